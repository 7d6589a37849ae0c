// Camera paths through key frames: geometry, interpolation and file layout. No part of it needs a page, so that Node
// runs it too.
//
// A key frame is {matrix, fov}: sixteen numbers, row by row, camera to world in the frame of the model with OpenGL axes
// (x right, y up, z back), and a vertical field of view in degrees. Such is nerfstudio's layout of camera paths.
// The interpolation is that of through() in splatcli/render/camera_paths.py, step by step, so that a preview shows the
// frames which `splat render --views` makes.

const DEGREES = 180 / Math.PI;

//: Samples that the length of a path is measured by.
const SAMPLES = 4096;
//: Least total of a path's movement, as a share of its coordinates, and of its rotation, radians.
const LEAST_MOVE = 1e-9;
const LEAST_TURN = 1e-6;
//: Most frames of a path; an hour at 30 a second.
export const MOST_FRAMES = 108000;
//: Default length in seconds, and frames a second.
const SECONDS = 4;
const FPS = 30;
//: Largest side of an image, pixels.
const MOST_PIXELS = 65536;

// --- Angles of view ---

// Return the largest [width, height] of this aspect ratio inside a window.
export const frameSize = (width, height, aspect) =>
    width > height * aspect ? [height * aspect, height] : [width, width / aspect];

// Return the angle in degrees, seen along `to` pixels, of a camera that sees `angle` along `from` pixels.
export const angleAlong = (angle, from, to) => 2 * DEGREES * Math.atan((Math.tan(angle / DEGREES / 2) * to) / from);

// --- Poses ---

// The viewer shows the model turned by `turn`, a rotation of nine numbers row by row. The angles of its cameras are in
// degrees: pitch, heading and roll, applied in this order about the fixed axes x, y and z.

// Return the matrix of a key frame at a viewer's camera.
export const poseOf = ([x, y, z], angles, turn) => {
    const [a, b, c] = angles.map((angle) => angle / DEGREES);
    const [sa, ca, sb, cb, sc, cc] = [Math.sin(a), Math.cos(a), Math.sin(b), Math.cos(b), Math.sin(c), Math.cos(c)];
    const inViewer = [
        cb * cc, sa * sb * cc - ca * sc, ca * sb * cc + sa * sc, x,
        cb * sc, sa * sb * sc + ca * cc, ca * sb * sc - sa * cc, y,
        -sb, sa * cb, ca * cb, z
    ];
    return turned(transposed(turn), inViewer);
};

// Return {position, angles, level} of a viewer's camera at the matrix of a key frame. level: the angles of the camera
// that looks the same way without roll, as the viewer's controls keep it.
export const cameraOf = (matrix, turn) => {
    const m = turned(turn, matrix);
    const position = [m[3], m[7], m[11]];
    const forward = [-m[2], -m[6], -m[10]];
    const upright = Math.abs(m[4]) < 1e-9 && m[5] >= 0;
    const heading = upright ? Math.atan2(-m[8], m[0]) : Math.atan2(-forward[0], -forward[2]);
    const pitch = upright ? Math.atan2(forward[1], m[5]) : Math.asin(Math.min(1, Math.max(-1, forward[1])));
    const level = [pitch * DEGREES, heading * DEGREES, 0];
    if (upright) return { position, angles: level, level };
    const sine = Math.min(1, Math.max(-1, -m[8]));
    const angles = Math.abs(sine) < 1 - 1e-12
        ? [Math.atan2(m[9], m[10]), Math.asin(sine), Math.atan2(m[4], m[0])]
        : [Math.atan2(-m[6], m[5]), Math.asin(sine), 0];
    return { position, angles: angles.map((angle) => angle * DEGREES), level };
};

const transposed = (r) => [r[0], r[3], r[6], r[1], r[4], r[7], r[2], r[5], r[8]];

// Return the 4x4 pose whose rotation and position are those of `m`, turned by `r`.
const turned = (r, m) => {
    const out = new Array(16).fill(0);
    for (let i = 0; i < 3; i++) {
        for (let j = 0; j < 4; j++) {
            out[4 * i + j] = r[3 * i] * m[j] + r[3 * i + 1] * m[4 + j] + r[3 * i + 2] * m[8 + j];
        }
    }
    out[15] = 1;
    return out;
};

// --- Rotations, as quaternions [x, y, z, w] ---

const quaternion = (m) => {
    const trace = m[0] + m[5] + m[10];
    const candidates = [m[0], m[5], m[10], trace];
    const largest = candidates.indexOf(Math.max(...candidates));
    const q = largest === 3
        ? [m[9] - m[6], m[2] - m[8], m[4] - m[1], 1 + trace]
        : largest === 0
            ? [1 + m[0] - m[5] - m[10], m[1] + m[4], m[2] + m[8], m[9] - m[6]]
            : largest === 1
                ? [m[1] + m[4], 1 - m[0] + m[5] - m[10], m[6] + m[9], m[2] - m[8]]
                : [m[2] + m[8], m[6] + m[9], 1 - m[0] - m[5] + m[10], m[4] - m[1]];
    const length = Math.hypot(...q);
    return q.map((value) => value / length);
};

const rotation = ([x, y, z, w]) => [
    1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
    2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
    2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)
];

// Return the angle between two rotations, radians, 0 to pi. By the chords, since a cosine near 1 has few digits.
const angleBetween = (p, q) => {
    const less = Math.hypot(...p.map((value, i) => value - q[i]));
    const more = Math.hypot(...p.map((value, i) => value + q[i]));
    return 4 * Math.atan2(Math.min(less, more), Math.max(less, more));
};

// Return the rotation at a share of the shortest way from one to the other.
const slerp = (p, q, share) => {
    const sign = p.reduce((sum, value, i) => sum + value * q[i], 0) < 0 ? -1 : 1;
    const half = angleBetween(p, q) / 2;
    const [a, b] = half < 1e-9
        ? [1 - share, share]
        : [Math.sin((1 - share) * half) / Math.sin(half), Math.sin(share * half) / Math.sin(half)];
    const mixed = p.map((value, i) => a * value + sign * b * q[i]);
    const length = Math.hypot(...mixed);
    return mixed.map((value) => value / length);
};

// --- The path ---

// Return the number of frames, rounded as Python rounds: halves to even numbers.
export const frameCount = ({ keyframes, seconds, fps }) => {
    if (keyframes.length === 1) return 1;
    const exact = seconds * fps;
    const near = Math.round(exact);
    return exact % 1 === 0.5 && near % 2 === 1 ? near - 1 : near;
};

// Return the share of the way, 0 to 1, that a frame is at; a closed path ends one frame before its start.
export const shareOf = (frame, frames, loop) => (frames < 2 ? 0 : frame / (loop ? frames : frames - 1));

// Return {at, shares} of the path through key frames, or null where they do not make one: none, or all equal.
// at(share): the key frame at a share of the way, 0 to 1, with constant speed. shares: that of each key frame.
export const pathThrough = (keyframes, loop) => {
    const fovs = keyframes.map(({ fov }) => fov);
    if (keyframes.length === 1) return { at: () => keyframes[0], shares: [0] };
    const poses = keyframes.map(({ matrix }) => ({ center: [matrix[3], matrix[7], matrix[11]], q: quaternion(matrix) }));
    const kept = distinct(poses, loop);
    const ends = loop ? [...fovs, fovs[0]] : fovs;
    const indices = ends.map((_, i) => i);
    if (kept.length < 2) {
        if (new Set(fovs).size < 2) return null;
        const last = indices.length - 1;
        const at = (share) => ({ matrix: keyframes[0].matrix, fov: interpolated(share * last, indices, ends) });
        return { at, shares: fovs.map((_, i) => i / last) };
    }
    let [keys, ids] = [kept.map((i) => poses[i]), kept];
    if (loop) {
        // Three poses beyond each end, so that the curve is smooth where it closes.
        const order = Array.from({ length: kept.length + 7 }, (_, i) => i - 3);
        const lap = (i) => Math.floor(i / kept.length);
        ids = order.map((i) => kept[i - lap(i) * kept.length] + lap(i) * keyframes.length);
        keys = order.map((i) => poses[kept[i - lap(i) * kept.length]]);
    }
    const way = cumulative(distances(keys));
    const [begin, end] = loop ? [way[3], way[way.length - 4]] : [way[0], way[way.length - 1]];
    const center = catmullRom(way, keys.map((key) => key.center));
    const pose = (u) => {
        const along = begin + u * (end - begin);
        const i = Math.min(segment(along, way), way.length - 2);
        const share = (along - way[i]) / (way[i + 1] - way[i]);
        return { center: center(along, i), q: slerp(keys[i].q, keys[i + 1].q, share) };
    };
    const count = Math.max(SAMPLES, 8 * keys.length);
    const samples = Array.from({ length: count + 1 }, (_, i) => i / count);
    const lengths = cumulative(distances(samples.map(pose)));
    const total = lengths[lengths.length - 1];
    const at = (share) => {
        const u = interpolated(share * total, lengths, samples);
        const { center: c, q } = pose(u);
        const r = rotation(q);
        const matrix = [...r.slice(0, 3), c[0], ...r.slice(3, 6), c[1], ...r.slice(6), c[2], 0, 0, 0, 1];
        return { matrix, fov: interpolated(interpolated(begin + u * (end - begin), way, ids), indices, ends) };
    };
    const shareAt = (id) => interpolated((interpolated(id, ids, way) - begin) / (end - begin), samples, lengths) / total;
    return { at, shares: fovs.map((_, i) => Math.min(1, Math.max(0, shareAt(i)))) };
};

// Return the distance from each pose to the next; translation and rotation have equal totals. Rounded numbers are no
// movement: a total that is as small as their differences has no weight.
const distances = (poses) => {
    const moved = [];
    const angles = [];
    for (let i = 1; i < poses.length; i++) {
        const [a, b] = [poses[i - 1], poses[i]];
        moved.push(Math.hypot(...a.center.map((value, k) => b.center[k] - value)));
        angles.push(angleBetween(a.q, b.q));
    }
    const [movedSum, anglesSum] = [moved, angles].map((values) => values.reduce((sum, value) => sum + value, 0));
    const reach = Math.max(...poses.map(({ center }) => Math.max(...center.map(Math.abs))));
    const both = movedSum > LEAST_MOVE * reach && anglesSum > LEAST_TURN;
    return moved.map((value, i) => (both ? Math.hypot(value, (movedSum / anglesSum) * angles[i]) : value + angles[i]));
};

// Return the indices of poses that differ from the one before; with a loop, the last also from the first.
const distinct = (poses, loop) => {
    const ways = distances(poses);
    const least = 1e-9 * ways.reduce((sum, value) => sum + value, 0);
    const kept = poses.length ? [0] : [];
    ways.forEach((value, i) => value > least && kept.push(i + 1));
    if (loop && kept.length > 1 && distances([poses[kept[kept.length - 1]], poses[0]])[0] <= least) kept.pop();
    return kept;
};

// Return the curve through points of any spacing: center(along, i), i being the segment. The tangent at a point is that
// of the parabola through it and its neighbours; at the ends it is the chord.
const catmullRom = (way, points) => {
    const last = points.length - 1;
    const slope = (i) => points[i].map((value, k) => (points[i + 1][k] - value) / (way[i + 1] - way[i]));
    const tangents = points.map((_, i) => {
        if (i === 0 || i === last) return slope(Math.min(i, last - 1));
        const [before, after] = [way[i] - way[i - 1], way[i + 1] - way[i]];
        const [a, b] = [slope(i - 1), slope(i)];
        return a.map((value, k) => (after * value + before * b[k]) / (before + after));
    });
    return (along, i) => {
        const step = way[i + 1] - way[i];
        const t = (along - way[i]) / step;
        const [t2, t3] = [t * t, t * t * t];
        return points[i].map((value, k) =>
            (2 * t3 - 3 * t2 + 1) * value + (t3 - 2 * t2 + t) * step * tangents[i][k]
            + (3 * t2 - 2 * t3) * points[i + 1][k] + (t3 - t2) * step * tangents[i + 1][k]);
    };
};

const cumulative = (values) => {
    const sums = [0];
    values.forEach((value, i) => sums.push(sums[i] + value));
    return sums;
};

// Return the last index whose value in a sorted list is not above `x`, or 0.
const segment = (x, list) => {
    let [low, high] = [0, list.length - 1];
    while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (list[middle] <= x) low = middle;
        else high = middle - 1;
    }
    return low;
};

// Return the value at `x` between those at the sorted `at`; the first or the last beyond them.
const interpolated = (x, at, values) => {
    if (x <= at[0]) return values[0];
    const i = segment(x, at);
    if (i >= at.length - 1) return values[at.length - 1];
    return values[i] + ((x - at[i]) / (at[i + 1] - at[i])) * (values[i + 1] - values[i]);
};

// --- The file ---

// Return a path as the text of a file in nerfstudio's layout.
export const fileOf = ({ keyframes, seconds, fps, loop, width, height }) => {
    const document = {
        camera_type: 'perspective',
        render_width: width,
        render_height: height,
        fps,
        seconds,
        is_cycle: loop,
        keyframes: keyframes.map(({ matrix, fov }) => ({ matrix, fov, aspect: width / height }))
    };
    return `${JSON.stringify(document, null, 1)}\n`;
};

// Return the path in the text of a file. size: where the file has none. Throw an Error that says what is wrong.
export const pathOf = (text, [width, height]) => {
    let document;
    try {
        document = JSON.parse(text);
    } catch {
        throw new Error('it is not JSON');
    }
    const entries = document?.keyframes;
    if (!Array.isArray(entries)) throw new Error('it has no "keyframes", so it is no camera path of this page or of nerfstudio');
    if (!['perspective', undefined, null].includes(document.camera_type)) {
        throw new Error(`its camera_type is ${quoted(document.camera_type)}; this page shows perspective cameras only`);
    }
    const path = {
        keyframes: entries.map((entry, i) => ({ matrix: matrixOf(entry, i + 1), fov: fovOf(entry, document, i + 1) })),
        seconds: numberOf(document, 'seconds', SECONDS, [1e-3, 1e9]),
        fps: numberOf(document, 'fps', FPS, [0.01, 1000]),
        loop: document.is_cycle === true,
        width: pixelsOf(document, 'render_width', width),
        height: pixelsOf(document, 'render_height', height)
    };
    const frames = frameCount(path);
    if (!(frames >= 1 && frames <= MOST_FRAMES)) {
        throw new Error(`seconds times fps are ${frames} frames, not 1 to ${MOST_FRAMES}`);
    }
    return path;
};

const quoted = (value) => String(JSON.stringify(value)).slice(0, 40);

// Older files have the matrix as JSON in a string, and column by column.
const matrixOf = (entry, number) => {
    let value = entry?.matrix ?? entry?.camera_to_world;
    try {
        if (typeof value === 'string') value = JSON.parse(value);
    } catch {
        value = null;
    }
    const m = Array.isArray(value) ? value.flat() : [];
    if (m.length !== 16 || !m.every(Number.isFinite)) throw new Error(`key frame ${number} has no 4x4 matrix`);
    const byColumns = [3, 7, 11].every((i) => m[i] === 0) && m.slice(12, 15).some((value) => value !== 0);
    const rows = byColumns ? m.map((_, i) => m[4 * (i % 4) + (i >> 2)]) : m;
    if (!isPose(rows)) throw new Error(`the matrix of key frame ${number} is not a camera pose`);
    return rows;
};

// Return whether a 4x4 matrix moves and rotates only: it does not scale, shear or mirror.
const isPose = (m) => {
    const [x, y, z] = [0, 4, 8].map((i) => m.slice(i, i + 3));
    const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
    const cross = [y[1] * z[2] - y[2] * z[1], y[2] * z[0] - y[0] * z[2], y[0] * z[1] - y[1] * z[0]];
    const products = [dot(x, x) - 1, dot(y, y) - 1, dot(z, z) - 1, dot(x, y), dot(y, z), dot(z, x)];
    return products.every((value) => Math.abs(value) < 1e-3) && dot(x, cross) > 0
        && [0, 0, 0, 1].every((value, i) => Math.abs(m[12 + i] - value) < 1e-6);
};

const fovOf = (entry, document, number) => {
    const value = entry.fov ?? document.default_fov;
    if (typeof value !== 'number' || !(value > 0 && value < 180)) {
        throw new Error(`the fov of key frame ${number} is ${quoted(value)}, not between 0 and 180 degrees`);
    }
    return value;
};

const numberOf = (document, key, otherwise, [least, most]) => {
    const value = document[key] ?? otherwise;
    if (typeof value !== 'number' || !(value >= least && value <= most)) {
        throw new Error(`${key} is ${quoted(value)}, not a number from ${least} to ${most}`);
    }
    return value;
};

const pixelsOf = (document, key, otherwise) => {
    const value = document[key] ?? otherwise;
    if (!Number.isInteger(value) || value < 1 || value > MOST_PIXELS) {
        throw new Error(`${key} is ${quoted(value)}, not a number of pixels from 1 to ${MOST_PIXELS}`);
    }
    return value;
};
