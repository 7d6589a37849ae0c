// Camera paths through key frames: geometry, interpolation and file layout. No part of it needs a page, so that Node
// runs it too.
//
// A key frame is {matrix, fov, time}: sixteen numbers, row by row, camera to world in the frame of the model with OpenGL
// axes (x right, y up, z back); a vertical field of view in degrees; and the seconds that the path takes to it from the
// one before, null for constant speed. Such is nerfstudio's layout of camera paths.
// The interpolation is that of frames_between() in splatcli/render/keyframes.py, step by step, so that a preview shows
// the frames which `splat render --views` makes.

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

// Return the times of a path's transitions: to the second key frame, to each after it and, in a loop, to the first.
export const transitionTimes = ({ keyframes, loop }) =>
    [...keyframes.slice(1), ...(loop ? keyframes.slice(0, 1) : [])].map(({ time }) => time);

// Return {curve, kept, stops, lengths, isZoom} of a path of two or more key frames, or null where all are equal. curve: see
// curveThrough(). stops: the places of the key frames on it, and of the first one again in a loop. lengths: of the
// transitions, as shares of the way.
const geometry = ({ keyframes, loop }) => {
    const poses = keyframes.map(({ matrix }) => ({ center: [matrix[3], matrix[7], matrix[11]], q: quaternion(matrix) }));
    const { kept, places } = distinct(poses, loop);
    const isZoom = kept.length < 2;
    if (isZoom && new Set(keyframes.map(({ fov }) => fov)).size < 2) return null;
    const last = keyframes.length - (loop ? 0 : 1);
    // Along a zoom, each transition is as long.
    const curve = isZoom
        ? {
            marks: Array.from({ length: last + 1 }, (_, i) => i / last),
            at: (share) => ({ matrix: keyframes[0].matrix, place: share * last })
        }
        : curveThrough(kept.map((i) => poses[i]), loop);
    const stops = isZoom ? curve.marks.map((_, i) => i) : [...places, ...(loop ? [kept.length] : [])];
    const lengths = stops.slice(1).map((stop, i) => curve.marks[stop] - curve.marks[stops[i]]);
    return { curve, kept, stops, lengths, isZoom };
};

// Return {at, along, shares, durations} of a path, or null where its key frames do not make one: none, or all equal.
// at(share): the key frame at a share of the time, 0 to 1. along(share): that at a share of the way. shares: of the time,
// for each key frame. durations: the seconds of each transition. Throw an Error where the times do not fit.
export const pathThrough = (path) => {
    const { keyframes, seconds, loop } = path;
    if (keyframes.length === 0) return null;
    if (keyframes.length === 1) {
        const at = () => keyframes[0];
        return { at, along: at, shares: [0], durations: [] };
    }
    const found = geometry(path);
    if (!found) return null;
    const { curve, kept, stops, lengths, isZoom } = found;
    const fovs = [...keyframes, ...(loop ? keyframes.slice(0, 1) : [])].map(({ fov }) => fov);
    const numbers = fovs.map((_, i) => i);
    const times = transitionTimes(path);
    if (times.every((time) => time === null)) {
        // Key frames that repeat the pose before lie between their neighbours.
        const ids = isZoom ? numbers : [...kept, ...(loop ? [keyframes.length] : [])];
        const places = ids.map((_, i) => i);
        const at = (share) => {
            const { matrix, place } = curve.at(share);
            return { matrix, fov: interpolated(interpolated(place, places, ids), numbers, fovs) };
        };
        const shares = numbers.map((id) => interpolated(interpolated(id, ids, places), places, curve.marks));
        const durations = shares.slice(1).map((share, i) => (share - shares[i]) * seconds);
        return { at, along: at, shares: shares.slice(0, keyframes.length), durations };
    }
    const durations = durationsOf(lengths, times, seconds);
    const clock = cumulative(durations);
    const total = clock[clock.length - 1];
    // A transition between equal poses rests, or zooms; without a time it is none, and its key frame is skipped.
    const there = numbers.filter((i) => i === 0 || durations[i - 1] > 1e-9 * total);
    const [nodes, hours, fovAt] = [stops, clock, fovs].map((values) => there.map((i) => values[i]));
    const wayAt = monotone(hours, nodes.map((place) => curve.marks[place]), loop);
    const at = (share) => {
        const hour = share * total;
        const { matrix, place } = curve.at(Math.min(1, Math.max(0, wayAt(hour))));
        const i = Math.min(segment(hour, hours), hours.length - 2);
        const steps = nodes[i + 1] - nodes[i];
        const since = steps > 0 ? (place - nodes[i]) / steps : (hour - hours[i]) / (hours[i + 1] - hours[i]);
        return { matrix, fov: fovAt[i] + Math.min(1, Math.max(0, since)) * (fovAt[i + 1] - fovAt[i]) };
    };
    const shares = clock.slice(0, keyframes.length).map((hour) => hour / total);
    return { at, along: curve.at, shares, durations };
};

// Return {marks, at} of the smooth path through poses that differ, and back to the first in a loop. marks: the share of
// the length at each pose. at(share): {matrix, place} at a share of the length, place being that among the poses.
const curveThrough = (poses, loop) => {
    // In a loop three poses beyond each end, so that the curve is smooth where it closes.
    const more = loop ? 3 : 0;
    const places = Array.from({ length: poses.length + (loop ? 7 : 0) }, (_, i) => i - more);
    const keys = places.map((place) => poses[(place + 3 * poses.length) % poses.length]);
    const way = cumulative(distances(keys));
    const [begin, end] = [way[more], way[way.length - 1 - more]];
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
        return { matrix, place: interpolated(begin + u * (end - begin), way, places) };
    };
    const marks = way.slice(more, way.length - more)
        .map((along) => interpolated((along - begin) / (end - begin), samples, lengths) / total);
    return { marks, at };
};

// Return the seconds of transitions of these lengths: those without a time share what the others leave, by length.
const durationsOf = (lengths, times, seconds) => {
    const fixed = times.reduce((sum, time) => sum + (time ?? 0), 0);
    const way = lengths.reduce((sum, length, i) => sum + (times[i] === null ? length : 0), 0);
    const rest = seconds - fixed;
    if (way > 0 && !(rest > 0)) {
        throw new Error(`transitions with a time of their own take ${short(fixed)} of the ${short(seconds)} seconds, and leave none to the others`);
    }
    return lengths.map((length, i) => times[i] ?? (way > 0 ? length * (rest / way) : 0));
};

const short = (value) => String(Number(value.toPrecision(6)));

// --- Edits of a path ---

const fixedOf = (path) => sumOf(transitionTimes(path).map((time) => time ?? 0));

// Return {rest, way} of a path: the seconds that times leave to the transitions without one, and the length of these.
const leftOf = (path, lengths) => ({
    rest: path.seconds - fixedOf(path),
    way: sumOf(transitionTimes(path).map((time, i) => (time === null ? lengths[i] : 0)))
});

const lengthsOf = (path) => (path.keyframes.length < 2 ? null : geometry(path)?.lengths);

// Return a path with other key frames, or another of its fields. Times that come and go add to its seconds, and those
// without one keep what they share.
export const changed = (path, changes) => {
    const next = { ...path, ...changes };
    if (!('seconds' in changes)) next.seconds += fixedOf(next) - fixedOf(path);
    return fitted(next);
};

// Return a path whose seconds are those of its times where all transitions have one; and where the times leave none to
// the others, with as many as these take at the mean speed of the first.
const fitted = (path) => {
    const lengths = transitionTimes(path).some((time) => time !== null) ? lengthsOf(path) : null;
    if (!lengths) return path.seconds > 0 ? path : { ...path, seconds: SECONDS };
    const { rest, way } = leftOf(path, lengths);
    if (way > 0 && rest > 1e-6 * path.seconds) return path;
    const fixed = fixedOf(path);
    return { ...path, seconds: fixed * (way < 1 ? 1 + way / (1 - way) : 2) };
};

// Return a path with a time of the transition to a key frame, or null for constant speed. The other transitions keep
// the seconds that they take.
export const withTime = (path, index, time) => {
    const keyframes = path.keyframes.map((key, i) => (i === index ? { ...key, time } : key));
    const lengths = lengthsOf(path);
    const transition = index > 0 ? index - 1 : path.keyframes.length - 1;
    if (!lengths || transition >= lengths.length) return { ...path, keyframes };
    const { rest, way } = leftOf(path, lengths);
    const before = path.keyframes[index].time;
    const others = before === null ? way - lengths[transition] : way;
    const speed = way > 0 ? rest / way : 0;
    // The last one with a time keeps the seconds where it goes back to constant speed, since there is no other speed.
    const after = time ?? (others > 0 ? lengths[transition] * speed : before);
    return fitted({ ...path, keyframes, seconds: path.seconds + after - (before ?? lengths[transition] * speed) });
};

// Return a path that takes so many seconds: times stay as long as there are transitions without. Throw an Error where
// they leave none to these.
export const withSeconds = (path, seconds) => {
    const lengths = transitionTimes(path).some((time) => time !== null) ? lengthsOf(path) : null;
    if (!lengths) return { ...path, seconds };
    if (leftOf(path, lengths).way > 0) {
        durationsOf(lengths, transitionTimes(path), seconds);
        return { ...path, seconds };
    }
    const scaled = ({ time, ...key }) => ({ ...key, time: time === null ? null : (time * seconds) / path.seconds });
    return { ...path, seconds, keyframes: path.keyframes.map(scaled) };
};

// Return the smooth function through rising values, 0 to 1, that rises wherever they do: a cubic in each interval, whose
// slopes at the ends are the weighted harmonic means of those of the chords (PCHIP). In a loop it is smooth where it
// closes.
const monotone = (at, values, loop) => {
    if (loop) {
        const period = at[at.length - 1];
        at = [...at.slice(0, -1).map((x) => x - period), ...at, ...at.slice(1).map((x) => x + period)];
        values = [...values.slice(0, -1).map((y) => y - 1), ...values, ...values.slice(1).map((y) => y + 1)];
    }
    const steps = at.slice(1).map((x, i) => x - at[i]);
    const chords = steps.map((step, i) => (values[i + 1] - values[i]) / step);
    const last = chords.length - 1;
    const atEnd = (i, next) => {
        if (next < 0 || next > last) return chords[i];
        const [h, g, a, b] = [steps[i], steps[next], chords[i], chords[next]];
        const slope = ((2 * h + g) * a - h * b) / (h + g);
        return Math.sign(slope) !== Math.sign(a) ? 0 : slope;
    };
    const slopes = at.map((_, i) => {
        if (i === 0) return atEnd(0, 1);
        if (i > last) return atEnd(last, last - 1);
        const [a, b] = [chords[i - 1], chords[i]];
        if (!(a > 0 && b > 0)) return 0;
        const [v, w] = [2 * steps[i] + steps[i - 1], steps[i] + 2 * steps[i - 1]];
        return (v + w) / (v / a + w / b);
    });
    return (x) => {
        const i = Math.min(segment(x, at), last);
        const [h, t] = [steps[i], (x - at[i]) / steps[i]];
        const [t2, t3] = [t * t, t * t * t];
        return (2 * t3 - 3 * t2 + 1) * values[i] + (t3 - 2 * t2 + t) * h * slopes[i]
            + (3 * t2 - 2 * t3) * values[i + 1] + (t3 - t2) * h * slopes[i + 1];
    };
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

// Return {kept, places}: the indices of poses that differ from the one before, and the place of each pose among them.
// With a loop, the last also differs from the first; poses at the end that do not have the place after all.
const distinct = (poses, loop) => {
    const ways = distances(poses);
    const least = 1e-9 * ways.reduce((sum, value) => sum + value, 0);
    const kept = [0];
    const places = [0];
    ways.forEach((value, i) => {
        if (value > least) kept.push(i + 1);
        places.push(kept.length - 1);
    });
    if (loop && kept.length > 1 && distances([poses[kept[kept.length - 1]], poses[0]])[0] <= least) kept.pop();
    return { kept, places };
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

export const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

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
        keyframes: keyframes.map(({ matrix, fov, time }) => ({
            matrix,
            fov,
            aspect: width / height,
            ...(time !== null && { override_transition_enabled: true, override_transition_sec: time })
        }))
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
        keyframes: entries.map((entry, i) => ({
            matrix: matrixOf(entry, i + 1),
            fov: fovOf(entry, document, i + 1),
            time: timeOf(entry, document, i + 1)
        })),
        seconds: numberOf(document, 'seconds', SECONDS, [1e-3, 1e9]),
        fps: numberOf(document, 'fps', FPS, [0.01, 1000]),
        loop: document.is_cycle === true,
        width: pixelsOf(document, 'render_width', width),
        height: pixelsOf(document, 'render_height', height)
    };
    // Where all transitions have a time, they count.
    const total = sumOf(pathThrough(path)?.durations ?? []);
    if (total > 0 && Math.abs(total - path.seconds) > 1e-9 * total) path.seconds = total;
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

// As nerfstudio has it: a key frame's own, or that of all.
const timeOf = (entry, document, number) => {
    const own = entry.override_transition_enabled === true ? entry.override_transition_sec ?? null : null;
    const value = own ?? document.default_transition_sec ?? null;
    if (value !== null && !(typeof value === 'number' && value > 0 && value < 1e9)) {
        throw new Error(`the transition time of key frame ${number} is ${quoted(value)}, not a number above 0`);
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
