/**
 * The loop as a picture: rollouts fill the buffer, the learner drains it, its weights go to the
 * engines, whose tokens the rollouts play with. Dashed arrows point from who waits to whom.
 */

import {draw, place} from './dom.js';
import {percent} from './format.js';
import {flows, inWords, nodes, waitArrows} from './loop_facts.js';

const NODE_HEIGHT = 98;
const WIDE_FROM = 560;
/** How long the dashes of a moving arrow take for their length; the style sheet has it too. */
const FLOW_MS = 1200;
/** From this share on a side stands out. */
const MARKED_SHARE = 0.1;

/** Draw `status` (the body of v1/status) into `holder`, as wide as it is. */
export function drawLoop(holder, status) {
  const width = Math.max(260, Math.floor(holder.clientWidth));
  const isWide = width >= WIDE_FROM;
  const height = isWide ? 316 : 430;
  const boxes = placed(width, height, isWide);
  const waits = waitArrows(status);
  const picture = draw(
    'svg',
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: 'img',
      'aria-labelledby': 'loop-text',
    },
    draw('title', {id: 'loop-text'}, inWords(status)),
    markers(),
  );
  for (const flow of flows(status)) picture.append(...flowArrow(boxes, flow, isWide));
  waits.forEach((wait, i) => picture.append(...waitArrow(boxes, wait, i, waits.length, isWide)));
  for (const [name, node] of Object.entries(nodes(status)))
    picture.append(nodeBox(boxes[name], node));
  place(holder, picture);
  // A new picture moves on from where the old one was.
  for (const animation of holder.getAnimations({subtree: true})) {
    animation.currentTime = performance.now() % FLOW_MS;
  }
}

function placed(width, height, isWide) {
  const nodeWidth = isWide ? Math.min(220, Math.floor(width * 0.33)) : Math.floor((width - 26) / 2);
  const right = width - nodeWidth - 1;
  const bottom = height - NODE_HEIGHT - 1;
  const box = (x, y) => ({x, y, width: nodeWidth, height: NODE_HEIGHT});
  return {
    rollouts: box(1, 1),
    buffer: box(right, 1),
    learner: box(right, bottom),
    engines: box(1, bottom),
  };
}

function markers() {
  const head = (id, kind) =>
    draw(
      'marker',
      {
        id,
        viewBox: '0 0 8 8',
        refX: 7,
        refY: 4,
        markerWidth: 9,
        markerHeight: 9,
        markerUnits: 'userSpaceOnUse',
        orient: 'auto-start-reverse',
      },
      draw('path', {d: 'M0 0 8 4 0 8z', class: kind}),
    );
  return draw('defs', {}, head('flow-head', 'flow-head'), head('wait-head', 'wait-head'));
}

/** `facts` are lines of [what stands out, what explains it]; a `share` adds a bar below them. */
function nodeBox(box, {title, facts, share}) {
  const left = box.x + 12;
  const rows = share === undefined ? facts : [...facts, ['', waitWords(share)]];
  const group = draw(
    'g',
    {class: share >= MARKED_SHARE ? 'node is-waiting' : 'node'},
    draw('rect', {class: 'box', x: box.x, y: box.y, width: box.width, height: box.height, rx: 9}),
    draw('text', {x: left, y: box.y + 24, class: 'title'}, title),
    ...rows.map(([strong, rest], i) =>
      draw(
        'text',
        {x: left, y: box.y + 45 + 20 * i, class: 'fact'},
        draw('tspan', {}, strong),
        rest,
      ),
    ),
  );
  if (share === undefined) return group;
  const bar = {x: left, y: box.y + 77, height: 8, rx: 4};
  group.append(
    draw('rect', {...bar, class: 'track', width: box.width - 24}),
    draw('rect', {...bar, class: 'fill', width: (box.width - 24) * (share ?? 0)}),
  );
  return group;
}

const waitWords = share => (share === null ? 'waiting not known yet' : `waits ${percent(share)}`);

function flowArrow(boxes, {from, to, lines, isMoving}, isWide) {
  const [a, b] = [boxes[from], boxes[to]];
  const isLevel = a.y === b.y;
  const isLeft = a.x < boxes.buffer.x;
  // On a phone the upright arrows keep to the outside, to leave room for words.
  const inset = isWide ? a.width / 2 : 24;
  const [start, end] = isLevel
    ? level(a, b)
    : upright(a, b, isLeft ? a.x + inset : a.x + a.width - inset);
  const arrow = draw('line', {
    x1: start.x,
    y1: start.y,
    x2: end.x,
    y2: end.y,
    'marker-end': 'url(#flow-head)',
    class: isMoving ? 'flow is-moving' : 'flow',
  });
  // Beside a level arrow there is no room on a phone.
  if (isLevel && !isWide) return [arrow];
  const middle = {x: (start.x + end.x) / 2, y: (start.y + end.y) / 2};
  const anchor = isLevel ? 'middle' : isLeft ? 'start' : 'end';
  const x = isLevel ? middle.x : middle.x + (isLeft ? 12 : -12);
  // The dashed arrows run from the upper left to the lower right; words keep to the other corners.
  const y = isLevel || isWide ? middle.y : middle.y + (isLeft ? 76 : -76);
  const rows = isLevel ? [y - 10, y + 20] : [y - 3, y + 14];
  return [
    arrow,
    ...lines.map((text, i) =>
      draw('text', {x, y: rows[i], 'text-anchor': anchor, class: 'flow-label'}, text),
    ),
  ];
}

const level = (a, b) => {
  const y = a.y + a.height / 2;
  return b.x > a.x
    ? [
        {x: a.x + a.width + 2, y},
        {x: b.x - 2, y},
      ]
    : [
        {x: a.x - 2, y},
        {x: b.x + b.width + 2, y},
      ];
};

const upright = (a, b, x) =>
  b.y > a.y
    ? [
        {x, y: a.y + a.height + 2},
        {x, y: b.y - 2},
      ]
    : [
        {x, y: a.y - 2},
        {x, y: b.y + b.height + 2},
      ];

/** Two arrows run side by side, each with its share on its outer side. */
function waitArrow(boxes, {from, to, share}, i, count, isWide) {
  const upper = boxes.rollouts;
  const lower = to === 'engines' ? boxes.engines : boxes.learner;
  const isOuter = i === 0;
  const aside = count > 1 ? (isOuter ? 1 : -1) * (isWide ? 22 : 10) : 0;
  const inset = isWide ? 34 : 16;
  const high = {x: upper.x + upper.width - inset + aside, y: upper.y + upper.height + 6};
  const low = {
    x: lower.x + (to === 'engines' ? lower.width - inset : inset) + aside,
    y: lower.y - 6,
  };
  const [start, end] = from === 'rollouts' ? [high, low] : [low, high];
  const along = isWide && isOuter ? 0.34 : isWide ? 0.62 : 0.5;
  const label = {x: high.x + (low.x - high.x) * along, y: high.y + (low.y - high.y) * along};
  return [
    draw('line', {
      x1: start.x,
      y1: start.y,
      x2: end.x,
      y2: end.y,
      class: 'wait',
      'stroke-width': 1.5 + 3 * share,
      'marker-end': 'url(#wait-head)',
    }),
    draw(
      'text',
      {
        x: label.x + (isOuter ? 12 : -12),
        y: label.y + (isOuter ? -4 : 14),
        'text-anchor': isOuter ? 'start' : 'end',
        class: 'wait-label',
      },
      `waits ${percent(share)}`,
    ),
  ];
}
