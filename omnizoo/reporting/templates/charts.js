/* Draws each chart from the JSON of its `data-chart`. Pointing at a chart shows the values of that step in all charts. */
'use strict';
const UNITS = 1000;  // width and height of a drawing, which the page stretches

const digits = (value, count) => String(Number(value.toPrecision(count)));

function format(value, form, count = 4) {
  if (form === 'percent') return digits(100 * value, count) + '%';
  if (form !== 'si') return digits(value, count);
  const size = Math.abs(value) < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(Math.abs(value)) / 3));
  return digits(value / 1000 ** size, count) + ['', ' k', ' M', ' G', ' T'][size];
}

/* Multiples of 1, 2 or 5 times a power of ten between low and high: about `count` of them. */
function ticks(low, high, count) {
  const power = 10 ** Math.floor(Math.log10((high - low) / count));
  const excess = step => Math.abs(Math.floor(high / step) - Math.ceil(low / step) + 1 - count);
  const step = [1, 2, 5, 10].map(m => m * power).reduce((a, b) => excess(b) < excess(a) ? b : a);
  const values = [];
  for (let i = Math.ceil(low / step); i <= Math.floor(high / step); i++) values.push(i * step);
  return values;
}

function logTicks(low, high) {
  for (const leading of [[1], [1, 3], [1, 2, 5]]) {
    const values = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.floor(Math.log10(high)); d++) {
      values.push(...leading.map(m => m * 10 ** d).filter(v => low <= v && v <= high));
    }
    if (values.length >= 3) return values.filter((_, i) => i % Math.ceil(values.length / 6) === 0);
  }
  return ticks(low, high, 4);
}

/* Adds `heights` to the curves: areas are stacked, other curves are drawn at their values. */
function stackAreas(curves) {
  let below = [];
  for (const curve of curves) {
    curve.heights = curve.look === 'area' ? curve.values.map((v, i) => v + (below[i] || 0)) : curve.values;
    if (curve.look === 'area') below = curve.heights;
  }
}

/* Range, ticks and scale of the vertical axis; the scale maps a value to 0 (top) ... UNITS (bottom). */
function verticalAxis(chart, isWide) {
  const heights = chart.curves.flatMap(curve => curve.heights).filter(v => v !== null);
  if (chart.limit !== null) heights.push(0, chart.limit);
  let low = heights.reduce((a, b) => Math.min(a, b)), high = heights.reduce((a, b) => Math.max(a, b));
  if (chart.log) {
    low /= 1.1;
    high *= 1.1;
    const scale = v => UNITS * (1 - Math.log(v / low) / Math.log(high / low));
    return {ticks: logTicks(low, high), scale};
  }
  const isConstant = high === low;
  const margin = isConstant ? Math.abs(high) / 2 || 1
    : Math.max((high - low) * 0.06, Math.abs(high) * 0.005);  // enough for labels that differ
  high += margin;
  if (chart.limit === null && !(isConstant && low === 0)) low -= margin;
  return {ticks: ticks(low, high, isWide ? 6 : 4), scale: v => UNITS * (1 - (v - low) / (high - low))};
}

/* SVG paths of a curve: lines break at gaps, and a stroke without length is a dot. */
function curvePaths(curve, x, y) {
  const runs = [[]];
  curve.heights.forEach((v, i) => {
    if (v === null) runs.push([]);
    else runs.at(-1).push(`${x(curve.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`);
  });
  const line = runs.filter(run => run.length > 1).map(run => 'M' + run.join(' ')).join('');
  const dots = points => points.map(point => `M${point}h0`).join('');
  if (curve.look === 'area') {
    const [left, right] = [curve.steps[0], curve.steps.at(-1)].map(x);
    return {area: `${line}L${right} ${UNITS}L${left} ${UNITS}Z`};
  }
  if (curve.look.includes('dots')) {
    const paths = {dots: dots(runs.flat())};
    return curve.look === 'dots' ? paths : {'dots line': line, ...paths};
  }
  return {[curve.look]: line, lone: dots(runs.filter(run => run.length === 1).flat())};
}

function addLabel(plot, look, side, share, text) {
  const label = document.createElement('s');
  label.className = look;
  label.style[side] = 100 * share + '%';
  label.textContent = text;
  plot.append(label);
  return label;
}

function draw(plot) {
  const chart = JSON.parse(plot.dataset.chart);
  const isWide = plot.parentNode.className === 'wide';
  stackAreas(chart.curves);
  const steps = chart.curves.filter(curve => curve.steps.length).flatMap(curve => [curve.steps[0], curve.steps.at(-1)]);
  let first = Math.min(...steps), last = Math.max(...steps);
  if (first === last) [first, last] = [first - 1, first + 1];
  const x = step => UNITS * (step - first) / (last - first);
  const axis = verticalAxis(chart, isWide), y = axis.scale;

  const svg = [];
  const path = (look, d) => { if (d) svg.push(`<path class="${look}" d="${d}"/>`); };
  path('rule', axis.ticks.map(tick => `M0 ${y(tick)}H${UNITS}`).join(''));
  for (const [look, marks] of Object.entries(chart.marks)) {
    const height = {resumed: 'V0', skipped: 'v-60', waited: 'v-25'}[look];
    const inside = marks.filter(step => first <= step && step <= last);
    path(look, inside.map(step => `M${x(step).toFixed(1)} ${UNITS}${height}`).join(''));
  }
  const isStacked = chart.curves[0].look === 'area';
  for (const curve of isStacked ? [...chart.curves].reverse() : chart.curves) {
    for (const [look, d] of Object.entries(curvePaths(curve, x, y))) path(`${look} c${curve.color}`, d);
  }
  if (chart.limit !== null) path('limit', `M0 ${y(chart.limit)}H${UNITS}`);
  path('cursor', `M0 0V${UNITS}`);
  plot.innerHTML = `<svg viewBox="0 0 ${UNITS} ${UNITS}" preserveAspectRatio="none">${svg.join('')}</svg>`;

  for (const tick of axis.ticks) addLabel(plot, 'y', 'top', y(tick) / UNITS, format(tick, chart.format));
  for (const [step, phase] of chart.phases) {
    const label = addLabel(plot, 'x', 'left', x(step) / UNITS, phase);
    label.style.transform = `translateX(-${x(step) / UNITS * 100}%)`;  // the last one stays inside the chart
  }
  const stepTicks = chart.phases.length ? [] : ticks(first, last, isWide ? 9 : 5).filter(Number.isInteger);
  for (const tick of stepTicks) addLabel(plot, 'x', 'left', x(tick) / UNITS, tick.toLocaleString('en'));
  const cursor = plot.querySelector('.cursor'), output = plot.parentNode.querySelector('output');
  return {...chart, plot, cursor, output, first, last, x};
}

/* Index of the step that is nearest to `at`, by bisection. */
function nearest(steps, at) {
  let a = 0, b = steps.length - 1;
  while (b - a > 1) {
    const middle = (a + b) >> 1;
    if (steps[middle] < at) a = middle; else b = middle;
  }
  return at - steps[a] <= steps[b] - at ? a : b;
}

function showValues(chart, at) {
  const curves = chart.curves.filter(curve => curve.name && curve.steps.length);
  const isShown = at !== null && curves.length > 0;
  chart.cursor.style.visibility = isShown ? 'visible' : 'hidden';
  if (!isShown) {
    chart.output.textContent = '';
    return;
  }
  const step = curves[0].steps[nearest(curves[0].steps, at)];
  chart.cursor.setAttribute('transform', `translate(${chart.x(step)} 0)`);
  const phase = chart.phases.findLast(([start]) => start <= step);
  const values = curves.map(curve => {
    const value = curve.values[nearest(curve.steps, step)];
    const text = value === null ? 'none' : format(value, chart.format === 'percent' ? 'percent' : 'plain', 5);
    return curves.length > 1 ? `${curve.name} ${text}` : text;
  });
  const place = chart.phases.length ? (phase ? phase[1] : '') : 'step ' + step.toLocaleString('en');
  chart.output.textContent = [place, ...values].join('  ·  ');
}

const charts = [...document.querySelectorAll('[data-chart]')].map(draw);
for (const {plot, first, last} of charts) {
  plot.onpointermove = event => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    charts.forEach(chart => showValues(chart, first + (last - first) * share));
  };
  plot.onpointerleave = () => charts.forEach(chart => showValues(chart, null));
}
