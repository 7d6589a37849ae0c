// The view of the camera-path editor on the page of `splat view`: SuperSplat's viewer.
//
// It stands outside the viewer. start() is given the handle that createViewer() returns, and the viewer's camera
// manager, which the page adds to it (splatcli/formats/html.py): `camera`, the position, angles and field of view of
// the next frame; `update`, which the viewer calls before each frame; and `snap()`, which makes the present controls go
// on from `camera`. The window's `app` alone would not do: what is set there lasts until the next update.

import { angleAlong, cameraOf, frameSize, poseOf } from './camera_path.js';
import { openEditor } from './path_editor.js';

//: What a camera may move without being moved: rounding. Shares of its distance to what it orbits, and degrees.
const STILL = 1e-4;
const STILL_ANGLE = 1e-2;

// Start the editor on the page of a viewer. settings: {turn, model, command}; see splatcli/viewer/path_editor.py.
export const start = (viewer, { turn, ...settings }) => {
    const open = () => openEditor(new SuperSplatView(viewer, turn), settings);
    // Before the scene is there, the viewer has no camera.
    if (viewer.cameraManager()) open();
    else viewer.events.once('firstFrame', open);
};

// The viewer's camera, read as key frames; and key frames shown in its place.
class SuperSplatView {
    // The viewer has 1 2 3 F G H R V W A S D Q E, arrows, space and escape.
    keys = { add: 'k', play: 'p', taken: '' };
    aspect = 16 / 9;

    constructor(viewer, turn) {
        Object.assign(this, { viewer, turn });
        this.manager = viewer.cameraManager();
        //: The vertical field of view of images, degrees; null for the viewer's own.
        this.lens = null;
        //: The key frame that is shown: exactly, so with its roll, which the viewer's controls do not have.
        this.shown = null;
        const { manager } = this;
        const update = manager.update.bind(manager);
        manager.update = (...words) => {
            update(...words);
            this.replace();
        };
        // The viewer has drawn from the camera by now; between frames it is as its controls left it.
        viewer.app.on('update', () => this.restore());
        viewer.events.on('controlsHidden:changed', () => this.onHide(viewer.state.controlsHidden));
    }

    // Inside the viewer's own element, which is what fills the screen when it is made full; the lines under its controls.
    attach(root, lines) {
        const { canvas } = this.viewer.app.graphicsDevice;
        canvas.parentElement.append(root);
        canvas.after(lines);
        this.onHide(this.viewer.state.controlsHidden);
    }

    get size() {
        const { width, height } = this.viewer.app.graphicsDevice;
        return [width, height];
    }

    get distance() {
        return this.manager.camera.distance;
    }

    get current() {
        if (this.shown) return { matrix: this.shown.matrix, fov: this.shown.fov };
        const { position: p, angles: a } = this.manager.camera;
        return { matrix: poseOf([p.x, p.y, p.z], [a.x, a.y, a.z], this.turn), fov: this.fov };
    }

    // The viewer draws each frame at once.
    get drawn() {
        return this.current;
    }

    get fov() {
        const [width, height] = this.size;
        // The viewer's angle is along the longer side of its window.
        const own = () => angleAlong(this.manager.camera.fov, Math.max(width, height), frameSize(width, height, this.aspect)[1]);
        return this.shown?.fov ?? this.lens ?? own();
    }

    set fov(degrees) {
        this.lens = degrees;
        if (this.shown) this.shown.fov = degrees;
        this.redraw();
    }

    redraw() {
        this.viewer.app.renderNextFrame = true;
    }

    // The controls go on from there, without roll.
    show({ matrix, fov }) {
        const { manager } = this;
        this.halt();
        const { position, level } = cameraOf(matrix, this.turn);
        const { camera } = manager;
        const [before, ahead] = [positionOf(camera), forwardOf(level)];
        const aim = forwardOf(anglesOf(camera)).map((value, i) => before[i] + camera.distance * value - position[i]);
        const distance = aim.reduce((sum, value, i) => sum + value * ahead[i], 0);
        camera.position.set(...position);
        camera.angles.set(...level);
        if (distance > 1e-3) camera.distance = distance; // orbit about what is as far as before
        manager.snap();
        this.lens = fov;
        this.shown = { matrix, fov, position, level, least: STILL * camera.distance };
    }

    // End the viewer's own animation, which moves the camera until a hand does.
    halt() {
        if (this.viewer.state.cameraMode === 'anim') this.viewer.events.fire('inputEvent', 'interrupt');
    }

    release() {
        this.shown = null;
        this.lens = null;
        this.redraw();
    }

    preview() {}

    replace() {
        const { camera } = this.manager;
        this.own = { position: positionOf(camera), angles: anglesOf(camera), fov: camera.fov };
        if (this.shown && this.isMoved()) {
            this.shown = null;
            this.onMove();
        }
        if (this.shown) {
            const { position, angles } = cameraOf(this.shown.matrix, this.turn);
            camera.position.set(...position);
            camera.angles.set(...angles);
        }
        if (this.shown || this.lens !== null) {
            const [width, height] = this.size;
            camera.fov = angleAlong(this.fov, frameSize(width, height, this.aspect)[1], Math.max(width, height));
        }
    }

    restore() {
        if (!this.own) return;
        const { camera } = this.manager;
        camera.position.set(...this.own.position);
        camera.angles.set(...this.own.angles);
        camera.fov = this.own.fov;
        this.own = null;
    }

    isMoved() {
        const { position, level, least } = this.shown;
        const far = Math.hypot(...position.map((value, i) => value - this.own.position[i]));
        const turns = level.map((value, i) => Math.abs(((((value - this.own.angles[i]) % 360) + 540) % 360) - 180));
        return far > least || Math.max(...turns) > STILL_ANGLE;
    }
}

const positionOf = ({ position }) => [position.x, position.y, position.z];
const anglesOf = ({ angles }) => [angles.x, angles.y, angles.z];
const forwardOf = ([pitch, heading]) => {
    const [a, b] = [(pitch * Math.PI) / 180, (heading * Math.PI) / 180];
    return [-Math.sin(b) * Math.cos(a), Math.sin(a), -Math.cos(b) * Math.cos(a)];
};
