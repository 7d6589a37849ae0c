// node screenshot.mjs NODE_MODULES URL PNG WIDTH HEIGHT READY [ELEMENT]: opens a page in headless Chromium, for which
// there is no network but 127.0.0.1, waits until the expression READY is true, and takes the page's picture, or
// that of a canvas. READY may be a promise. Prints a JSON object: the requests that were made, the errors in the page and
// in its console, and the value of READY.
import { createRequire } from 'node:module';
import { writeFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';

const [, , modules, url, png, width, height, ready, element] = process.argv;
const require = createRequire(`${modules}/`);
const load = async (name) => (await import(pathToFileURL(require.resolve(name)))).default;
const chromium = await load('@sparticuz/chromium');
const puppeteer = await load('puppeteer-core');

const browser = await puppeteer.launch({
    executablePath: await chromium.executablePath(),
    headless: 'shell',
    args: [
        '--no-sandbox',
        '--use-gl=angle',
        '--use-angle=swiftshader',
        '--enable-unsafe-swiftshader',
        '--ignore-gpu-blocklist',
        '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1'
    ]
});
const requests = [];
const errors = [];
let value;
try {
    const tab = await browser.newPage();
    await tab.setViewport({ width: Number(width), height: Number(height) });
    tab.on('request', (request) => {
        if (/^https?:|^wss?:/.test(request.url())) requests.push(request.url());
    });
    tab.on('pageerror', (error) => errors.push(String(error)));
    tab.on('console', (message) => {
        if (message.type() === 'error') errors.push(message.text());
    });
    // What SuperSplat's viewer calls when its first picture is whole.
    await tab.evaluateOnNewDocument(() => {
        window.firstFrame = () => { window.isDrawn = true; };
    });
    await tab.goto(url, { waitUntil: 'load', timeout: 120000 });
    value = await (await tab.waitForFunction(ready, { timeout: 180000 })).jsonValue();
    if (element) {
        const data = await tab.evaluate((id) => document.querySelector(id).toDataURL('image/png'), element);
        await writeFile(png, Buffer.from(data.split(',')[1], 'base64'));
    } else {
        await tab.screenshot({ path: png });
    }
} finally {
    await browser.close();
}
console.log(JSON.stringify({ requests, errors, value }));
