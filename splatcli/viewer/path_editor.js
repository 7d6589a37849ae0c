// The camera-path editor: a panel that collects key frames of a view and saves them as a file for `splat render
// --views`. It belongs to no page: each brings its own view, an object with
//
//   size            [width, height] of the window, pixels
//   aspect          width by height of images; the editor sets it
//   current         the key frame {matrix, fov} of the view; fov is vertical, that of images, in degrees
//   drawn           the same of the picture on the screen, which may be an earlier one
//   fov             of `current`, to get and to set
//   distance        to what the view turns about
//   show(keyframe)  shows a key frame, with its roll, until a hand moves the view; then the view calls onMove()
//   halt()          ends a movement of the page's own
//   release()       gives the page its own view and field of view again
//   redraw()        asks for a picture, since `aspect` has changed
//   preview(isOn)   says whether the path is played
//   attach(root, lines)  puts the panel and the canvas under it into the page
//   keys            {add, play}: the keys of the two, in lower case; `taken` says, for the title of a button, what another
//                   key does there
//
// and calls what the editor sets: onMove(), and onHide(isHidden), when the page's own controls hide or appear.

import {
    MOST_FRAMES, changed, fileOf, frameCount, frameSize, pathOf, pathThrough, shareOf, withSeconds, withTime
} from './camera_path.js';

const FILE = 'camera_path.json';
//: Samples of the path that is drawn over the scene.
const DRAWN = 256;
//: Most steps that are undone.
const UNDONE = 200;
//: Least seconds of a transition.
const LEAST_TIME = 0.001;

// --- The panel ---

const icon = (shape) => `<svg viewBox="0 0 20 20" aria-hidden="true">${shape}</svg>`;
const ICONS = {
    path: icon('<path d="M3 15c4 0 3-9 7-9s2 7 7 7"/><circle cx="3" cy="15" r="1.6"/><circle cx="10" cy="6" r="1.6"/><circle cx="17" cy="13" r="1.6"/>'),
    close: icon('<path d="M5 5l10 10M15 5L5 15"/>'),
    play: icon('<path d="M6 4l10 6-10 6z" fill="currentColor"/>'),
    pause: icon('<path d="M7 4v12M13 4v12"/>'),
    undo: icon('<path d="M4 8h8a4.5 4.5 0 0 1 0 9H8M4 8l4-4M4 8l4 4"/>'),
    redo: icon('<path d="M16 8H8a4.5 4.5 0 0 0 0 9h4M16 8l-4-4M16 8l-4 4"/>'),
    replace: icon('<path d="M15.5 8A6 6 0 1 0 16 11M16 4v4h-4"/>'),
    up: icon('<path d="M5 12l5-5 5 5"/>'),
    down: icon('<path d="M5 8l5 5 5-5"/>'),
    remove: icon('<path d="M4 6h12M8 6V4h4v2M6 6l1 10h6l1-10"/>'),
    copy: icon('<rect x="7" y="7" width="9" height="9" rx="2"/><path d="M4 13V6a2 2 0 0 1 2-2h7"/>')
};

const MARKUP = `
    <canvas class="splat-path-lines" data-id="lines" aria-hidden="true"></canvas>
    <button class="open" data-id="open" aria-expanded="false">${ICONS.path}<span>Camera path</span></button>
    <section data-id="panel" aria-label="Camera path" hidden>
        <header><h2>${ICONS.path}Camera path</h2>
            <button class="icon" data-id="undo">${ICONS.undo}</button><button class="icon" data-id="redo">${ICONS.redo}</button>
            <button class="icon" data-id="close" title="Close" aria-label="Close">${ICONS.close}</button></header>
        <div class="body">
            <button class="main" data-id="add" title="Add a key frame at this view">Add key frame <kbd data-id="key"></kbd></button>
            <p class="hint" data-id="hint">Move to a view and add it. Two or more key frames make a video, one makes an image.</p>
            <ol data-id="list"></ol>
            <div class="line">
                <button class="icon" data-id="play" aria-label="Preview">${ICONS.play}</button>
                <input type="range" data-id="frame" min="0" value="0" step="1" aria-label="Frame of the preview" title="Drag to see the view at a time">
                <output data-id="time"></output>
            </div>
            <div class="fields">
                <label>Seconds <input type="number" data-id="seconds" min="0.1" step="any" inputmode="decimal"></label>
                <label>Frames/s <input type="number" data-id="fps" min="0.01" max="1000" step="any" inputmode="decimal"></label>
                <label>Width <input type="number" data-id="width" min="1" max="65536" step="1" inputmode="numeric"></label>
                <label>Height <input type="number" data-id="height" min="1" max="65536" step="1" inputmode="numeric"></label>
            </div>
            <label class="line" title="Vertical field of view of the images">Field of view
                <input type="range" data-id="fov" min="5" max="120" step="0.5"><output data-id="degrees"></output></label>
            <label class="line check"><input type="checkbox" data-id="loop" title="Back to the first key frame at the end">Closed loop</label>
            <div class="line">
                <button data-id="save" title="Save as ${FILE}">Save</button>
                <button data-id="load" title="Load ${FILE}, or drop it on the page">Load</button>
                <input type="file" data-id="file" accept=".json,application/json" hidden>
            </div>
            <div class="command" data-id="next"><code data-id="command"></code>
                <button class="icon" data-id="copy" title="Copy the command" aria-label="Copy the command">${ICONS.copy}</button></div>
        </div>
        <p class="status" data-id="status" role="status"></p>
    </section>`;

// Open the editor of a view on its page, folded away. settings: {model, command}; see splatcli/viewer/path_editor.py.
// Return the function that goes over to another model, given its settings.
export const openEditor = (view, settings) => {
    const style = document.createElement('link');
    style.rel = 'stylesheet';
    style.href = new URL('./path_editor.css', import.meta.url).href;
    document.head.append(style);
    const root = document.createElement('div');
    root.className = 'splat-path';
    root.innerHTML = MARKUP;
    const dom = Object.fromEntries([...root.querySelectorAll('[data-id]')].map((element) => [element.dataset.id, element]));
    dom.key.textContent = view.keys.add.toUpperCase();
    dom.open.title = `Camera path: key frames for splat render (${dom.key.textContent} adds one)`;
    view.onMove = () => {
        stop();
        select(null);
    };
    view.onHide = (isHidden) => dom.open.classList.toggle('faded', isHidden);
    view.attach(root, dom.lines);
    let storage = ''; // the name of the key frames in the browser's storage
    let command = ''; // that renders the model
    let path = null;
    let track = null; // the interpolation between the key frames; null where there is none
    let points = []; // along it, to draw
    let selected = null;
    let playing = null;
    let version = 0; // of what is drawn
    let [done, undone] = [[], []]; // the last change at the end; see remember()
    let lens = null; // the field of view before the slider was moved

    const say = (text, isError = false) => {
        dom.status.textContent = text;
        dom.status.classList.toggle('error', isError);
    };

    // --- Changes ---

    // A change is {what, path} or {what, fov}: its name, and the path or the field of view of the view before it, or after
    // it once it is undone.
    const remember = (what, before) => {
        done.push({ what, ...before });
        if (done.length > UNDONE) done.shift();
        undone = [];
        showChanges();
    };

    // Undo or redo the last change of a list, which goes to the other one.
    const revert = (from, to, word) => {
        const { what, ...state } = from.pop() ?? {};
        if (!what) return;
        to.push({ what, ...(state.path ? { path } : { fov: view.fov }) });
        showChanges();
        if (state.path) {
            become(state.path, `${word}: ${what}.`);
        } else {
            stop();
            view.fov = state.fov;
            say(`${word}: ${what}.`);
        }
    };
    const undo = () => revert(done, undone, 'Undone');
    const redo = () => revert(undone, done, 'Redone');

    const change = (changes, what, text = '') => {
        remember(what, { path });
        become(changed(path, changes), text);
    };

    const become = (next, text = '') => {
        stop();
        path = next;
        view.aspect = path.width / path.height;
        track = pathThrough(path);
        points = track && path.keyframes.length > 1
            ? Array.from({ length: DRAWN + 1 }, (_, i) => track.along(i / DRAWN).matrix) : [];
        view.redraw();
        version++;
        show();
        try {
            localStorage.setItem(storage, fileOf(path));
        } catch {
            // A browser may refuse storage; then the path lasts as long as the page.
        }
        const isStuck = path.keyframes.length > 1 && !track;
        say(isStuck ? `${text} All key frames are equal: move the view and replace one.` : text);
    };

    const keyframesWith = (edit) => {
        const keyframes = [...path.keyframes];
        edit(keyframes);
        return { keyframes };
    };

    const add = () => {
        expand(true);
        const number = path.keyframes.length + 1;
        change(keyframesWith((keys) => keys.push({ ...view.current, time: null })), `add key frame ${number}`, `Key frame ${number} added.`);
        dom.list.lastElementChild.scrollIntoView({ block: 'nearest' });
    };

    const actions = {
        go: (i) => {
            stop();
            view.show(path.keyframes[i]);
            select(i);
            if (track) dom.frame.value = Math.round(track.shares[i] * (path.loop ? frames() : frames() - 1));
            dom.time.textContent = timeText();
            say('');
        },
        replace: (i) => change(
            keyframesWith((keys) => keys.splice(i, 1, { ...keys[i], ...view.current })),
            `replace key frame ${i + 1}`,
            `Key frame ${i + 1} is this view now.`
        ),
        up: (i) => change(keyframesWith((keys) => keys.splice(i - 1, 2, keys[i], keys[i - 1])), `move key frame ${i + 1} up`),
        down: (i) => change(keyframesWith((keys) => keys.splice(i, 2, keys[i + 1], keys[i])), `move key frame ${i + 1} down`),
        remove: (i) => change(keyframesWith((keys) => keys.splice(i, 1)), `delete key frame ${i + 1}`, `Key frame ${i + 1} deleted.`)
    };

    const setNumber = (key, whole) => {
        const value = dom[key].valueAsNumber;
        const [least, most] = [Number(dom[key].min), Number(dom[key].max || Infinity)];
        if (!(value >= least && value <= most) || (whole && !Number.isInteger(value))) {
            say(`${dom[key].parentElement.textContent.trim()}: a ${whole ? 'whole ' : ''}number from ${least}${most < Infinity ? ` to ${most}` : ''}`, true);
        } else if (value !== shown(path[key])) {
            const what = dom[key].parentElement.textContent.trim().toLowerCase();
            attempt(() => (key === 'seconds' ? withSeconds(path, value) : { ...path, [key]: value }), what);
        }
        dom[key].value = shown(path[key]);
    };

    // The seconds from the key frame before, or back to the first; an empty field is constant speed.
    const setTime = (i, field) => {
        const value = field.value === '' && !field.validity.badInput ? null : field.valueAsNumber;
        if (value === null || (value >= LEAST_TIME && value < 1e9)) attempt(() => withTime(path, i, value), `time to key frame ${i + 1}`);
        else say(`Seconds of a transition: a number from ${LEAST_TIME}, or nothing for constant speed`, true);
        show();
    };

    // Go over to a path, or say why not.
    const attempt = (make, what) => {
        try {
            const next = make();
            const count = frameCount(next);
            if (next.keyframes.length !== 1 && !(count >= 1 && count <= MOST_FRAMES)) {
                throw new Error(`that would be ${count} frames, not 1 to ${MOST_FRAMES}`);
            }
            remember(what, { path });
            become(next);
        } catch (error) {
            say(`Not changed: ${error.message}.`, true);
        }
    };

    const load = async (file) => {
        try {
            const found = pathOf(await file.text(), [path.width, path.height]);
            if (!found.keyframes.length) throw new Error('it has no key frames');
            change(found, `load ${file.name}`, `${found.keyframes.length} key frames of ${file.name}`);
        } catch (error) {
            say(`${file.name} is not loaded: ${error.message}`, true);
        }
    };

    const save = () => {
        const link = document.createElement('a');
        link.href = URL.createObjectURL(new Blob([fileOf(path)], { type: 'application/json' }));
        link.download = FILE;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
        say(`${FILE} is saved by the browser. Run the command in its folder.`);
    };

    const copy = async () => {
        try {
            await navigator.clipboard.writeText(dom.command.textContent);
            say('Copied.');
        } catch {
            // Without a clipboard, as on pages of other machines.
            getSelection().selectAllChildren(dom.command);
            say('Selected: copy it with Ctrl-C.');
        }
    };

    // --- Preview ---

    const frames = () => frameCount(path);

    const showFrame = (frame) => {
        dom.frame.value = frame;
        view.show(track.at(shareOf(frame, frames(), path.loop)));
        dom.time.textContent = timeText();
    };

    const play = () => {
        if (playing) {
            stop();
            return;
        }
        if (points.length === 0) return;
        select(null);
        const first = Number(dom.frame.value) < frames() - 1 ? Number(dom.frame.value) : 0;
        playing = { first, since: performance.now() };
        view.preview(true);
        show();
    };

    const stop = () => {
        if (!playing) return;
        playing = null;
        view.preview(false);
        version++;
        show();
    };

    const playOn = () => {
        const { first, since } = playing;
        const frame = first + Math.floor(((performance.now() - since) / 1000) * path.fps);
        if (!path.loop && frame >= frames() - 1) {
            showFrame(frames() - 1);
            stop();
        } else {
            showFrame(frame % frames());
        }
    };

    // --- What the panel shows ---

    const timeText = () => `${(Number(dom.frame.value) / path.fps).toFixed(1)} / ${Number(path.seconds.toFixed(1))} s`;

    const select = (i) => {
        selected = i;
        [...dom.list.children].forEach((row, k) => row.classList.toggle('selected', k === i));
        version++;
    };

    // Numbers in fields, without the last digits of sums.
    const shown = (value) => Number(value.toFixed(3));

    // Return the field for the time of the transition to a key frame.
    const step = (i) => {
        const count = path.keyframes.length;
        const made = document.createElement('label');
        made.className = 'step';
        made.title = i > 0
            ? `Seconds from key frame ${i} to ${i + 1}; empty for constant speed`
            : `Seconds from key frame ${count} back to 1; empty for constant speed`;
        const field = document.createElement('input');
        Object.assign(field, { type: 'number', min: LEAST_TIME, step: 'any', inputMode: 'decimal' });
        field.setAttribute('aria-label', made.title);
        field.dataset.time = i;
        const { time } = path.keyframes[i];
        if (time !== null) field.value = shown(time);
        const taken = track?.durations[i > 0 ? i - 1 : count - 1] ?? 0;
        field.placeholder = taken.toFixed(1);
        field.addEventListener('change', () => setTime(i, field));
        made.append(field, 's');
        return made;
    };

    const row = ({ fov }, i) => {
        const item = document.createElement('li');
        const line = document.createElement('div');
        const button = (name, title, content, disabled = false) => {
            const made = document.createElement('button');
            made.className = name === 'go' ? 'go' : 'icon';
            made.title = title;
            made.setAttribute('aria-label', `${title}: key frame ${i + 1}`);
            made.innerHTML = content;
            made.disabled = disabled;
            made.addEventListener('click', () => actions[name](i));
            line.append(made);
        };
        const time = track && path.keyframes.length > 1 ? `${(track.shares[i] * path.seconds).toFixed(1)} s` : '';
        button('go', 'Go to this view', `<b>${i + 1}</b><span>${time}</span><span>${Number(fov.toFixed(1))}°</span>`);
        button('replace', 'Replace by the present view', ICONS.replace);
        button('up', 'Move up', ICONS.up, i === 0);
        button('down', 'Move down', ICONS.down, i === path.keyframes.length - 1);
        button('remove', 'Delete', ICONS.remove);
        if (i > 0) item.append(step(i));
        item.append(line);
        if (path.loop && i > 0 && i === path.keyframes.length - 1) item.append(step(0));
        return item;
    };

    // A browser breaks lines within "--views", too.
    const unbroken = (word) => {
        const made = document.createElement('span');
        made.textContent = word;
        return made;
    };

    const show = () => {
        const isVideo = points.length > 0;
        const at = dom.list.contains(document.activeElement) ? document.activeElement.dataset.time : undefined;
        dom.list.replaceChildren(...path.keyframes.map(row));
        dom.list.querySelector(`[data-time="${at}"]`)?.focus();
        selected = null;
        dom.hint.hidden = path.keyframes.length > 0;
        for (const key of ['seconds', 'fps', 'width', 'height']) dom[key].value = shown(path[key]);
        dom.loop.checked = path.loop;
        dom.frame.max = Math.max(0, frames() - 1);
        dom.frame.disabled = dom.play.disabled = !isVideo;
        dom.play.innerHTML = playing ? ICONS.pause : ICONS.play;
        const keys = [view.keys.play.toUpperCase(), view.keys.taken].filter(Boolean).join('; ');
        dom.play.title = `${playing ? 'Stop the preview' : 'Preview'} (${keys})`;
        dom.time.textContent = timeText();
        dom.save.disabled = !track;
        dom.next.hidden = !track;
        const words = `${command} --views ${FILE} -o ${isVideo ? 'path.mp4' : 'view.png'}`.split(' ');
        dom.command.replaceChildren(...words.flatMap((word, i) => [i ? ' ' : '', unbroken(word)]));
    };

    const showChanges = () => {
        for (const [button, word, list, keys] of [[dom.undo, 'Undo', done, 'Ctrl-Z'], [dom.redo, 'Redo', undone, 'Ctrl-Shift-Z']]) {
            button.disabled = list.length === 0;
            button.title = `${word}${list.length ? `: ${list[list.length - 1].what}` : ''} (${keys})`;
            button.setAttribute('aria-label', button.title);
        }
    };

    const expand = (isOpen) => {
        if (isOpen === !dom.panel.hidden) return;
        dom.panel.hidden = !isOpen;
        dom.open.hidden = isOpen;
        dom.open.setAttribute('aria-expanded', String(isOpen));
        if (isOpen) {
            view.halt();
            version++;
            requestAnimationFrame(tick);
        } else {
            stop();
            view.release(); // the page is what it was
            dom.lines.getContext('2d').clearRect(0, 0, dom.lines.width, dom.lines.height);
        }
    };

    // --- Lines over the scene ---

    let drawn = '';
    const tick = () => {
        if (dom.panel.hidden) return;
        requestAnimationFrame(tick);
        if (playing) playOn();
        dom.fov.value = view.fov;
        dom.degrees.textContent = `${view.fov.toFixed(1)}°`;
        const { matrix, fov } = view.drawn;
        const [width, height] = [dom.lines.clientWidth, dom.lines.clientHeight];
        const state = [version, width, height, fov, ...matrix].join();
        if (state === drawn) return;
        drawn = state;
        draw(matrix, fov, width, height);
    };

    const draw = (matrix, fov, width, height) => {
        const scale = window.devicePixelRatio || 1;
        Object.assign(dom.lines, { width: width * scale, height: height * scale });
        const pen = dom.lines.getContext('2d');
        pen.scale(scale, scale);
        const [w, h] = frameSize(width, height, path.width / path.height);
        // What the images do not show is darker.
        pen.fillStyle = 'rgba(0, 0, 0, 0.45)';
        const [x, y] = [(width - w) / 2, (height - h) / 2];
        for (const bar of [[0, 0, x, height], [width - x, 0, x, height], [0, 0, width, y], [0, height - y, width, y]]) {
            if (bar[2] > 0.5 && bar[3] > 0.5) pen.fillRect(...bar);
        }
        if (playing) return;
        const focal = h / 2 / Math.tan((fov * Math.PI) / 360);
        const near = 1e-3 * extent();
        const project = (point) => {
            const d = [0, 1, 2].map((i) => point[i] - matrix[4 * i + 3]);
            const [a, b, c] = [0, 1, 2].map((k) => d[0] * matrix[k] + d[1] * matrix[4 + k] + d[2] * matrix[8 + k]);
            return -c > near ? [width / 2 - (focal * a) / c, height / 2 + (focal * b) / c] : null;
        };
        const stroke = (ends, colour, thickness) => {
            const places = ends.map(project);
            pen.beginPath();
            places.forEach((place, i) => {
                if (!place) return;
                if (i && places[i - 1]) pen.lineTo(...place);
                else pen.moveTo(...place);
            });
            // A dark edge, so that it is seen on any ground.
            for (const [style, more] of [['rgba(0, 0, 0, 0.55)', 2.5], [colour, 0]]) {
                Object.assign(pen, { strokeStyle: style, lineWidth: thickness + more, lineJoin: 'round' });
                pen.stroke();
            }
        };
        stroke(points.map((m) => [m[3], m[7], m[11]]), '#ffaf50', 2);
        path.keyframes.forEach((key, i) => {
            const corners = pyramid(key, 0.12 * extent());
            const colour = i === selected ? '#fff' : '#f60';
            if (Math.hypot(...[3, 7, 11].map((k) => key.matrix[k] - matrix[k])) < 0.2 * extent()) return; // it is the view
            const [tip, a, b, c, d] = corners;
            stroke([a, b, c, d, a, tip, b, c, tip, d], colour, 1.5);
            const place = project(tip);
            if (!place) return;
            pen.font = 'bold 12px Arial, sans-serif';
            Object.assign(pen, { lineWidth: 3, strokeStyle: 'rgba(0, 0, 0, 0.7)', fillStyle: '#fff' });
            pen.strokeText(String(i + 1), place[0] + 7, place[1] - 7);
            pen.fillText(String(i + 1), place[0] + 7, place[1] - 7);
        });
    };

    // Return a length that suits the path: the mean distance of key frames, else that to what the view turns about.
    const extent = () => {
        const keys = path.keyframes;
        const steps = keys.slice(1).map((key, i) => Math.hypot(...[3, 7, 11].map((k) => key.matrix[k] - keys[i].matrix[k])));
        const mean = steps.reduce((sum, value) => sum + value, 0) / Math.max(1, steps.length);
        return mean || view.distance;
    };

    // Return the tip and the four corners of a key frame's field of view.
    const pyramid = ({ matrix: m, fov }, depth) => {
        const high = depth * Math.tan((fov * Math.PI) / 360);
        const wide = (high * path.width) / path.height;
        const at = (a, b, c) => [0, 1, 2].map((i) => m[4 * i] * a + m[4 * i + 1] * b - m[4 * i + 2] * c + m[4 * i + 3]);
        return [at(0, 0, 0), at(-wide, high, depth), at(wide, high, depth), at(wide, -high, depth), at(-wide, -high, depth)];
    };

    // --- Hands ---

    dom.open.addEventListener('click', () => expand(true));
    dom.close.addEventListener('click', () => expand(false));
    dom.add.addEventListener('click', add);
    dom.play.addEventListener('click', play);
    dom.frame.addEventListener('input', () => {
        stop();
        select(null);
        showFrame(Number(dom.frame.value));
    });
    for (const key of ['seconds', 'fps']) dom[key].addEventListener('change', () => setNumber(key, false));
    for (const key of ['width', 'height']) dom[key].addEventListener('change', () => setNumber(key, true));
    dom.fov.addEventListener('input', () => {
        lens ??= view.fov;
        view.fov = Number(dom.fov.value);
    });
    dom.fov.addEventListener('change', () => {
        if (lens !== null && lens !== view.fov) remember('field of view', { fov: lens });
        lens = null;
    });
    dom.loop.addEventListener('change', () => change({ loop: dom.loop.checked }, 'closed loop'));
    dom.undo.addEventListener('click', undo);
    dom.redo.addEventListener('click', redo);
    dom.save.addEventListener('click', save);
    dom.load.addEventListener('click', () => dom.file.click());
    dom.file.addEventListener('change', () => {
        const [file] = dom.file.files;
        if (file) load(file);
        dom.file.value = ''; // the same file can be chosen again
    });
    dom.copy.addEventListener('click', copy);
    const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes('Files');
    window.addEventListener('dragover', (event) => holdsFiles(event) && event.preventDefault());
    window.addEventListener('drop', (event) => {
        if (!holdsFiles(event)) return;
        event.preventDefault();
        expand(true);
        if (event.dataTransfer.files[0]) load(event.dataTransfer.files[0]);
    });

    // What is typed but not entered yet is undone by the field itself.
    let typed = null;
    root.addEventListener('input', (event) => { typed = event.target; });
    root.addEventListener('change', () => { typed = null; });

    // No page has keys with Ctrl.
    const shortcuts = { [view.keys.add]: add, [view.keys.play]: () => !dom.panel.hidden && play() };
    const isField = (element) => element.matches('input, select, textarea');
    const takesText = (element) => isField(element) && !['range', 'checkbox'].includes(element.type);
    window.addEventListener('keydown', (event) => {
        if (document.querySelector('dialog[open]')) return; // the page behind it has no keys
        const target = event.composedPath()[0];
        const isTyped = target instanceof Element && takesText(target);
        const key = /^[\x20-\x7e]$/.test(event.key) ? event.key.toLowerCase() : event.code.replace('Key', '').toLowerCase();
        if (event.ctrlKey !== event.metaKey && !event.altKey && ['z', 'y'].includes(key) && !dom.panel.hidden) {
            if (isTyped && target === typed) return;
            event.preventDefault();
            if (key === 'y' || event.shiftKey) redo();
            else undo();
            return;
        }
        if (event.ctrlKey || event.altKey || event.metaKey || event.repeat || isTyped) return;
        shortcuts[key]?.();
    }, true);
    // What is typed into the panel is not for the page, whose keys work everywhere on it; but letters are, where nothing
    // can be typed.
    const isOwn = ({ target, key }) =>
        takesText(target) || key === ' ' || key === 'Enter' || (isField(target) && !/^[a-z?]$/i.test(key));
    for (const kind of ['keydown', 'keyup']) {
        root.addEventListener(kind, (event) => {
            if (isOwn(event)) event.stopPropagation();
        });
    }

    const goOver = (other) => {
        ({ command } = other);
        storage = `splat camera path of ${other.model}`;
        const portrait = view.size[1] > view.size[0];
        const [width, height] = portrait ? [720, 1280] : [1280, 720];
        let next = { keyframes: [], seconds: 4, fps: 30, loop: false, width, height };
        let stored = null;
        try {
            stored = localStorage.getItem(storage);
        } catch {
            // refused, as above
        }
        try {
            if (stored) next = pathOf(stored, [width, height]);
        } catch {
            // of another version
        }
        [done, undone] = [[], []];
        showChanges();
        become(next);
    };
    goOver(settings);
    return goOver;
};
