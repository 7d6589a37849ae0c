// Libraries of others on files of splats, for test_third_party.py: node others.mjs MODULES WHAT IN OUT [MORE].
import fs from "node:fs";

const [modules, what, source, target, ...more] = process.argv.slice(2);
const bytes = new Uint8Array(fs.readFileSync(source));
const load = (path) => import(`${modules}/${path}`);

if (what === "spz") {
    // The library of the format's makers: its numbers in the frame of a PLY, or as they are stored.
    const spz = await (await load("@adobe/spz/dist/spz.js")).default({ print: () => {}, printErr: () => {} });
    const cloud = spz.loadSpzFromBuffer(bytes, { to: spz.CoordinateSystem[more[0]] });
    const names = ["positions", "scales", "rotations", "alphas", "colors", "sh"];
    const tables = names.map((name) => [name, Array.from(cloud[name], (value) => Math.max(-99, Math.min(99, value)))]);
    fs.writeFileSync(target, JSON.stringify(Object.fromEntries(tables)));
} else if (what === "ksplat") {
    // GaussianSplats3D makes its format of a PLY; it looks for a browser.
    Object.assign(globalThis, { window: globalThis, document: { createElement: () => ({}) } });
    const splats = await load("@mkkellogg/gaussian-splats-3d/build/gaussian-splats-3d.module.js");
    const [level, degree, section, block, bucket] = more.map(Number);
    const options = [1, level, true, degree, section, undefined, block, bucket];
    const made = await splats.PlyLoader.loadFromFileData(bytes.buffer, ...options);
    fs.writeFileSync(target, Buffer.from(made.bufferData));
} else if (what === "glb") {
    // three.js, as it would draw it: covariances, colours in bytes, harmonics in bytes.
    Object.assign(globalThis, { self: globalThis });
    const addons = "three/examples/jsm/loaders";
    const { GLTFLoader } = await load(`${addons}/GLTFLoader.js`);
    const { GLTFGaussianSplatLoaderExtension } = await load(`${addons}/GLTFGaussianSplatLoaderExtension.js`);
    const loader = new GLTFLoader().register((parser) => new GLTFGaussianSplatLoaderExtension(parser));
    const scene = (await loader.parseAsync(bytes.buffer, "")).scene;
    const tables = {};
    scene.traverse((found) => {
        for (const [name, table] of Object.entries(found.splatGeometry?.attributes ?? {})) {
            const values = name.startsWith("spherical") ? new Uint8Array(table.array.buffer) : table.array;
            tables[name] = Array.from(values);
        }
    });
    fs.writeFileSync(target, JSON.stringify(tables));
}
