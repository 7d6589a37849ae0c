// The view of the camera-path editor on the page of `splat train --viewer` (live.html), whose pictures the server
// renders.
//
// The page hands over
//   size       [width, height] of its window, pixels
//   camera     {eye, axes, half, distance}, to read and to change: axes are right, down and forward in the frame of the
//              model; half is that of the window's height at depth 1; distance is to what the camera turns about
//   picture    {eye, axes, half} that the picture on the screen was drawn for; null before the first
//   changed()  asks for a picture
//   preview(isOn)  hides the page's own lines, or shows them again
//   attach(root, lines)
// and it draws with the view's `half`, and calls moved() when a hand has moved the camera.

import { frameSize } from './camera_path.js';
import { openEditor } from './path_editor.js';

// Open the editor on the page. settings: {model, command}; see splatcli/viewer/path_editor.py.
// Return the view, and the function that goes over to another model.
export const start = (page, settings) => {
    const view = new LiveView(page);
    return { view, goOver: openEditor(view, settings) };
};

// The page's camera, read as key frames, and moved to key frames. Its axes have a roll as key frames do.
export class LiveView {
    // The page has 1 to 9 W A S D Q E F C P H and the question mark.
    keys = { add: 'k', play: 'v', taken: 'P pauses training' };
    aspect = 16 / 9;
    //: The vertical field of view of images, degrees; null for the page's own.
    lens = null;
    //: The matrix of the key frame that is shown, to the last digit; null once a hand has moved the camera.
    shown = null;

    constructor(page) {
        this.page = page;
    }

    get size() {
        return this.page.size;
    }

    get distance() {
        return this.page.camera.distance;
    }

    get current() {
        return { matrix: this.shown ?? matrixOf(this.page.camera), fov: this.fov };
    }

    get drawn() {
        const { picture } = this.page;
        return picture ? { matrix: matrixOf(picture), fov: degreesOf(picture.half * this.share) } : this.current;
    }

    get fov() {
        return this.lens ?? degreesOf(this.page.camera.half * this.share);
    }

    set fov(degrees) {
        this.lens = degrees;
        this.page.changed();
    }

    // Half the height of the window at depth 1, for the page to draw.
    get half() {
        return this.lens === null ? this.page.camera.half : Math.tan((this.lens * Math.PI) / 360) / this.share;
    }

    // What part of the window's height images have.
    get share() {
        const [width, height] = this.size;
        return frameSize(width, height, this.aspect)[1] / height;
    }

    show({ matrix, fov }) {
        const { camera } = this.page;
        const { eye, axes } = cameraAt(matrix);
        const aim = camera.eye.map((value, i) => value + camera.distance * camera.axes[2][i] - eye[i]);
        const distance = dot(aim, axes[2]);
        // It orbits about what is as far as before.
        Object.assign(camera, { eye, axes, distance: distance > 1e-3 * camera.distance ? distance : camera.distance });
        this.shown = matrix;
        this.fov = fov;
    }

    // A hand has moved the camera.
    moved() {
        if (!this.shown) return;
        this.shown = null;
        this.onMove();
    }

    halt() {} // the page moves by itself never

    release() {
        this.shown = null;
        this.lens = null;
        this.page.changed();
    }

    redraw() {
        this.page.changed();
    }

    preview(isOn) {
        this.page.preview(isOn);
    }

    attach(root, lines) {
        this.page.attach(root, lines);
    }
}

const degreesOf = (half) => (360 / Math.PI) * Math.atan(half);
const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const unit = (a) => {
    const length = Math.hypot(...a);
    return a.map((value) => value / length);
};

// Return the matrix of a key frame at a camera: OpenGL axes are right, up and back.
const matrixOf = ({ eye, axes: [right, down, forward] }) =>
    [...[0, 1, 2].flatMap((i) => [right[i], -down[i], -forward[i], eye[i]]), 0, 0, 0, 1];

// Return the eye and the axes of the camera at the matrix of a key frame, which is a rotation up to rounding.
const cameraAt = (m) => {
    const forward = unit([-m[2], -m[6], -m[10]]);
    const right = unit(cross([-m[1], -m[5], -m[9]], forward));
    return { eye: [m[3], m[7], m[11]], axes: [right, cross(forward, right), forward] };
};
