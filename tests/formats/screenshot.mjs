// node screenshot.mjs NODE_MODULES PAGE PNG: opens a page in headless Chromium without a network, and takes its picture.
// Prints a JSON object: the requests that left the page, and the errors in it.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [, , modules, page, png] = process.argv;
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
        '--host-resolver-rules=MAP * ~NOTFOUND'
    ]
});
const tab = await browser.newPage();
await tab.setViewport({ width: 480, height: 360 });
const requests = [];
const errors = [];
tab.on('request', (request) => {
    const url = request.url();
    if (/^https?:|^wss?:/.test(url)) requests.push(url);
});
tab.on('pageerror', (error) => errors.push(String(error)));
await tab.goto(`${pathToFileURL(page)}?noanim&noui&webgl`, { waitUntil: 'load', timeout: 120000 });
await new Promise((resolve) => setTimeout(resolve, Number(process.env.SETTLE ?? 15000)));
await tab.screenshot({ path: png });
await browser.close();
console.log(JSON.stringify({ requests, errors }));
