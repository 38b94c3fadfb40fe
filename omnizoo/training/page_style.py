"""What the pages of OmniZoo look like, and the script that reads charts out. One look for all of them."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} · OmniZoo</title><style>{style}</style></head><body><main>
{body}
</main><script type="application/json" id="data">{data}</script><script>{script}</script></body></html>
"""

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#16191f;--soft:#687182;--rule:#e6e9ee;--line:#2f6fed;
--dots:#e8710a;--bad:#d93025;--done:#137a3f;--open:#a05a00}
@media(prefers-color-scheme:dark){:root{--page:#0e1116;--card:#171b22;--ink:#e7eaf0;--soft:#8e98a8;--rule:#262c36;
--line:#6ea1ff;--dots:#ffa657;--bad:#ff6b60;--done:#56d38a;--open:#f0b35a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1208px;margin:0 auto;padding:32px 24px 64px}
h1{margin:0;font-size:26px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:36px 0 12px;font-size:17px}
header p{margin:4px 0 24px;color:var(--soft);display:flex;justify-content:space-between;gap:16px;flex-wrap:wrap}
mark{margin-left:12px;padding:3px 10px;border-radius:99px;background:var(--rule);color:var(--soft);font-size:13px;
font-weight:600;letter-spacing:0;vertical-align:4px;white-space:nowrap}
mark.done{color:var(--done)}mark.open{color:var(--open)}
dl{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:0 0 12px}
@media(max-width:800px){dl{grid-template-columns:repeat(2,1fr)}}
dl div,figure,details,.scroll{background:var(--card);border:1px solid var(--rule);border-radius:10px}
dl div{padding:12px 16px}
dt,small,figcaption,text{color:var(--soft);fill:var(--soft);font-size:13px}
dd{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.grid{margin-top:12px;display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:12px}
figure{margin:0;padding:12px 8px 4px 8px;min-width:0}
figure.wide{grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:center;padding:0 8px 6px;min-height:27px}
figcaption b,figcaption i{white-space:nowrap}
figcaption b{color:var(--ink);font-size:14px}
figcaption output{margin-left:auto;color:var(--ink);font-variant-numeric:tabular-nums;overflow:hidden}
figcaption i{font-style:normal;display:flex;align-items:center;gap:6px}
figcaption i[class]:before{content:"";width:14px;height:3px;border-radius:2px;background:var(--own,var(--line))}
figcaption i.faint:before{opacity:.45}
figcaption i.dots:before{width:7px;height:7px;border-radius:9px;background:var(--own)}
figcaption i.resumed:before{width:0;height:12px;border-radius:0;background:none;border-left:2px dashed var(--open)}
figcaption i.mark:before{width:2px;height:10px;background:var(--bad)}
.plot{position:relative;height:170px;margin:4px 18px 26px 62px;touch-action:pan-y}
.wide .plot{height:280px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot s{position:absolute;text-decoration:none;color:var(--soft);font-size:11.5px;line-height:1;white-space:nowrap;
font-variant-numeric:tabular-nums;pointer-events:none}
.plot s.y{right:100%;margin-right:8px;transform:translateY(-50%)}
.plot s.x{top:100%;margin-top:8px;transform:translateX(-50%)}
.c0{--own:var(--line)}.c1{--own:var(--dots)}.c2{--own:#1b9e77}.c3{--own:#d6409f}.c4{--own:#8e6cef}.c5{--own:#b58900}
.c6{--own:#0aa5c2}.c7{--own:#7d8796}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
text{font-size:11.5px;font-variant-numeric:tabular-nums}
text.y{text-anchor:end}text.x{text-anchor:middle}
path{fill:none;vector-effect:non-scaling-stroke;stroke-linecap:round;stroke-linejoin:round}
path.rule{stroke:var(--rule)}
path.line,path.faint{stroke:var(--own,var(--line));stroke-width:1.8}
path.faint{opacity:.45;stroke-width:1.2}
path.dots{stroke:var(--own);stroke-width:6}
path.lone{stroke:var(--own,var(--line));stroke-width:5}
path.dots.line{stroke:var(--own);stroke-width:1.5}
path.mark{stroke:var(--bad);stroke-width:2}
path.resumed{stroke:var(--open);stroke-dasharray:4 4;stroke-width:1.2}
path.cursor{stroke:var(--soft);stroke-dasharray:2 3;visibility:hidden}
details{padding:12px 16px}summary{cursor:pointer;font-weight:600}
pre{margin:12px 0 0;overflow:auto;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}
.scroll{overflow:auto;max-height:420px}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{padding:7px 16px;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top;min-width:6em;
overflow-wrap:break-word}
th{color:var(--soft);font-weight:600}
main img{max-width:100%}
.facts td:first-child{color:var(--soft);white-space:nowrap;width:1%}
.facts td{white-space:pre-line;overflow-wrap:anywhere}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
@media(max-width:640px){main{padding:20px 12px 40px}h1{font-size:21px}mark{margin-left:8px;vertical-align:2px}
dd{font-size:18px}dl div{padding:9px 12px}figcaption output{flex-basis:100%;min-height:1.4em;margin:0}
.wide .plot{height:220px}.plot{margin-left:52px;margin-right:12px}.wide .plot s.x:nth-of-type(even){display:none}
th,td{padding:6px 10px}}
"""

# Hovering one chart reads the same step out of all of them.
SCRIPT = """
const data = JSON.parse(document.getElementById('data').textContent);
const charts = [...document.querySelectorAll('[data-chart]')].map(plot => ({...data[plot.dataset.chart], plot,
  cursor: plot.querySelector('.cursor'), out: plot.parentNode.querySelector('output')}));
const nearest = (steps, at) => {
  let a = 0, b = steps.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (steps[m] < at) a = m; else b = m; }
  return at - steps[a] <= steps[b] - at ? a : b;
};
const text = (value, percent) =>
  (percent ? 100 * value : value).toLocaleString('en', {maximumSignificantDigits: 5}) + (percent ? '%' : '');
const show = at => charts.forEach(({step, percent, curves, cursor, out}) => {
  cursor.style.visibility = at === null ? 'hidden' : 'visible';
  const known = curves.filter(c => c.steps.length);
  if (at === null || !known.length) { out.textContent = ''; return; }
  const s = known[0].steps[nearest(known[0].steps, at)];
  cursor.setAttribute('transform', `translate(${1000 * (s - step[0]) / (step[1] - step[0])} 0)`);
  const name = c => curves.length > 1 ? c.name + ' ' : '';
  const values = known.map(c => name(c) + text(c.values[nearest(c.steps, s)], percent));
  out.textContent = ['step ' + s.toLocaleString('en'), ...values].join('  \u00b7  ');
});
charts.forEach(({plot, step}) => {
  plot.onpointermove = e => {
    const box = plot.getBoundingClientRect(), at = (e.clientX - box.left) / box.width;
    show(step[0] + (step[1] - step[0]) * Math.min(1, Math.max(0, at)));
  };
  plot.onpointerleave = () => show(null);
});
"""
