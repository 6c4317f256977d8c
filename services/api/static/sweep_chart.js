/** Score against realised staleness, a line for each series, as SVG. */

import {draw} from './dom.js';
import {fixed, plural} from './format.js';

const HEIGHT = 300;
const EDGE = {left: 46, right: 16, top: 12, bottom: 44};
/** Colours of the style sheet; a series beyond them takes the next mark with the first colour. */
export const NUM_COLOURS = 10;
const MARK = 4.5;

/** Linear up to one version, powers of two beyond: 0 -> 0, 1 -> 1, 2 -> 2, 4 -> 3, 64 -> 7. */
export const placeOf = staleness => (staleness <= 1 ? staleness : 1 + Math.log2(staleness));

/** From 0 where a score is low, else from a tenth below the lowest: [0.88, 0.95] -> [0.8, 1]. */
export function scoreRange(scores) {
  const low = Math.max(0, Math.floor(Math.min(...scores) * 10 - 0.5) / 10);
  const high = Math.min(1, Math.ceil(Math.max(...scores) * 10 + 0.2) / 10);
  return low <= 0.3 ? [0, Math.max(high, 0.1)] : [low, Math.max(high, low + 0.1)];
}

/** 0.93 (0.88 to 0.97), 3 runs, 1 failed */
export function wordsOf(point) {
  const band =
    point.low === null
      ? ''
      : ` (${fixed(Math.max(0, point.low))} to ${fixed(Math.min(1, point.high))})`;
  const failed = point.num_failed ? `, ${point.num_failed} failed` : '';
  const fallen = point.num_collapsed ? `, ${point.num_collapsed} collapsed` : '';
  return `${fixed(point.mean)}${band}, ${plural(point.num_arms, 'run')}${failed}${fallen}`;
}

/**
 * The picture at `width` pixels. `series`: [{name, number, points}], of which the ones shown;
 * `all`: the points of every series, which decide the axes; onPoint(text): one is pointed at or has
 * the focus, null for none.
 */
export function sweepChart({width, series, all, onPoint}) {
  const known = all.filter(isDrawn);
  const top = Math.max(1, ...known.map(point => placeOf(point.staleness)));
  const [low, high] = scoreRange(known.map(point => point.mean));
  const inside = {w: width - EDGE.left - EDGE.right, h: HEIGHT - EDGE.top - EDGE.bottom};
  const x = staleness => EDGE.left + (placeOf(staleness) / top) * inside.w;
  const y = score => EDGE.top + (1 - (score - low) / (high - low)) * inside.h;
  const lines = series.map(one => drawSeries(one, {x, y, low, high, onPoint}));
  return draw(
    'svg',
    {
      class: 'sweep-chart',
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: 'group',
      'aria-label': 'Held-out score against realised staleness',
    },
    ...scoreAxis(low, high, width, y),
    ...stalenessAxis(top, x),
    ...lines,
  );
}

export const isDrawn = point => point.staleness !== null && point.mean !== null;

function scoreAxis(low, high, width, y) {
  const step = high - low > 0.55 ? 0.2 : high - low > 0.25 ? 0.1 : 0.05;
  const ticks = [];
  for (let n = Math.round(low / step); n * step <= high + 1e-9; n += 1) ticks.push(n * step);
  return ticks.flatMap(value => [
    draw('line', {class: 'grid', x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value)}),
    draw(
      'text',
      {x: EDGE.left - 8, y: y(value) + 4, 'text-anchor': 'end'},
      fixed(value, step < 0.1 ? 2 : 1),
    ),
  ]);
}

function stalenessAxis(top, x) {
  const values = [0];
  for (let n = 0; n + 1 <= top + 0.02; n += 1) values.push(2 ** n);
  const bottom = HEIGHT - EDGE.bottom;
  return [
    ...values.map(value =>
      draw('text', {x: x(value), y: bottom + 18, 'text-anchor': 'middle'}, String(value)),
    ),
    draw(
      'text',
      {x: (x(0) + x(values.at(-1))) / 2, y: bottom + 38, 'text-anchor': 'middle'},
      'realised staleness, versions',
    ),
  ];
}

function drawSeries({name, number, points}, {x, y, low, high, onPoint}) {
  const shown = points.filter(isDrawn).toSorted((a, b) => a.staleness - b.staleness);
  const clamp = score => y(Math.min(high, Math.max(low, score)));
  const path = shown.map((p, i) => `${i ? 'L' : 'M'}${x(p.staleness)} ${y(p.mean)}`).join('');
  return draw(
    'g',
    {class: `series series-${number % NUM_COLOURS}`},
    ...shown
      .filter(point => point.low !== null)
      .map(point =>
        draw('line', {
          class: 'band',
          x1: x(point.staleness),
          x2: x(point.staleness),
          y1: clamp(point.low),
          y2: clamp(point.high),
        }),
      ),
    draw('path', {class: 'line', d: path}),
    ...shown.map(point => {
      const text = `${name} at ${fixed(point.staleness, 1)} versions: ${wordsOf(point)}`;
      const node = draw(
        'g',
        {
          class: 'point',
          tabindex: '0',
          role: 'img',
          'aria-label': text,
          transform: `translate(${x(point.staleness)} ${y(point.mean)})`,
        },
        draw('circle', {class: 'reach', r: 12}),
        mark(number),
      );
      for (const type of ['pointerenter', 'focus']) node.addEventListener(type, () => onPoint(text));
      for (const type of ['pointerleave', 'blur']) node.addEventListener(type, () => onPoint(null));
      return node;
    }),
  );
}

/** The mark of a series: colour alone would not tell ten of them apart. */
export function mark(number) {
  const shape = Math.floor(number + number / NUM_COLOURS) % SHAPES.length;
  return draw('path', {class: 'mark', d: SHAPES[shape]});
}

const m = MARK;
const SHAPES = [
  `M${-m} 0a${m} ${m} 0 1 0 ${2 * m} 0a${m} ${m} 0 1 0 ${-2 * m} 0Z`,
  `M${-m} ${-m}H${m}V${m}H${-m}Z`,
  `M0 ${-m * 1.3}L${m * 1.2} ${m}H${-m * 1.2}Z`,
  `M0 ${-m * 1.4}L${m * 1.4} 0L0 ${m * 1.4}L${-m * 1.4} 0Z`,
  `M0 ${m * 1.3}L${m * 1.2} ${-m}H${-m * 1.2}Z`,
  `M-1.8 ${-m}H1.8V-1.8H${m}V1.8H1.8V${m}H-1.8V1.8H${-m}V-1.8H-1.8Z`,
  'M-4.6 -2.3L-2.3 -4.6L0 -2.3L2.3 -4.6L4.6 -2.3L2.3 0L4.6 2.3L2.3 4.6L0 2.3L-2.3 4.6L-4.6 2.3L-2.3 0Z',
];
