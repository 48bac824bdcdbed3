// Opens every page of build/site at the widths of a phone and of a laptop, and names those that overflow, with what is
// too wide. Needs Node, `npm install playwright-core` and Chromium:
//     node docs/_site/widths.mjs build/site /usr/bin/chromium
// With a third argument, a folder, each page is also photographed there at both widths, light and dark.
import {readdirSync} from 'node:fs';
import {join, resolve} from 'node:path';
import {chromium} from 'playwright-core';

const [site = 'build/site', executablePath = '/usr/bin/chromium', pictures] = process.argv.slice(2);
const pages = readdirSync(site, {recursive: true}).filter(file => file.endsWith('.html') && file !== '404.html');
const args = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-background-networking', '--disable-sync'];
const browser = await chromium.launch({executablePath, args});
const looks = [390, 1280].flatMap(width => (pictures ? ['light', 'dark'] : ['light']).map(scheme => [width, scheme]));
let failed = 0;
for (const [width, colorScheme] of looks) {
  const page = await browser.newPage({viewport: {width, height: 1500}, colorScheme});
  for (const file of pages) {
    await page.goto('file://' + resolve(join(site, file)));
    const wide = await page.evaluate(() => {
      const root = document.documentElement;
      const scrolls = e => e && (['auto', 'scroll'].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
      const content = document.querySelector('.md-content') ?? root;
      const beyond = [...content.querySelectorAll('*')].filter(
        e => e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e.parentElement));
      return root.scrollWidth > root.clientWidth + 1 || beyond.length
        ? `${root.scrollWidth} of ${root.clientWidth}: ${beyond.slice(0, 3).map(e => e.outerHTML.slice(0, 80)).join(' ')}` : null;
    });
    if (wide) {
      failed += 1;
      console.log(`${file} at ${width}: ${wide}`);
    }
    if (pictures) {
      await page.screenshot({path: join(pictures, `${width}-${colorScheme}`, `${file.replaceAll('/', '_')}.png`)});
    }
  }
}
await browser.close();
console.log(`${pages.length} pages, ${failed} too wide`);
process.exit(failed ? 1 : 0);
