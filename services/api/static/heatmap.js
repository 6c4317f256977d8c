/** Staleness over steps: the stronger a cell, the more of the step's trajectories were that old. */

import {colour, Plot, WHOLE} from './charts.js';

const MIN_CELL_PX = 2;

/** A `Plot` whose cells are painted below the axes; `show(steps, bound)` feeds it. */
export class StalenessMap {
  constructor(holder, onPlace) {
    this.rows = [];
    this.bound = null;
    this.plot = new Plot(holder, {
      series: [{isHidden: true}],
      range: () => [-0.5, (this.top() + 0.5) * (this.bound === null ? 1 : 1.16)],
      format: value => (value > this.top() ? '' : String(value)),
      increments: WHOLE,
      margin: 0.5,
      hasGrid: false,
      canZoom: false,
      onPlace,
      hooks: {drawAxes: [u => this.paint(u)]},
    });
  }

  /** Highest row: the bound, or what was seen beyond it. */
  top() {
    const seen = this.rows.reduce((most, row) => Math.max(most, row.at(-1)?.[0] ?? 0), 0);
    return Math.max(1, seen, this.bound ?? 0);
  }

  show(steps, bound) {
    this.rows = steps.map(line => line.staleness);
    this.bound = bound;
    const numbers = steps.map(line => line.step);
    // The values are not drawn: uPlot wants some to know where the pointer is.
    this.plot.show([numbers, numbers.map(() => 0)]);
  }

  recolour() {
    this.plot.recolour();
  }

  paint(u) {
    const {ctx, bbox} = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const low = parse(colour('heat-low'));
    const high = parse(colour('heat-high'));
    for (const {x0, x1, shares} of columns(u, this.rows)) {
      for (const [staleness, share] of shares) {
        const y0 = u.valToPos(staleness + 0.5, 'y', true);
        const y1 = u.valToPos(staleness - 0.5, 'y', true);
        ctx.fillStyle = between(low, high, share);
        ctx.fillRect(
          x0,
          y0,
          Math.max(1, x1 - x0 - gap(x1 - x0)),
          Math.max(1, y1 - y0 - gap(y1 - y0)),
        );
      }
    }
    this.paintBound(u, ctx);
    ctx.restore();
  }

  paintBound(u, ctx) {
    if (this.bound === null) return;
    const y = Math.round(u.valToPos(this.bound + 0.5, 'y', true)) - devicePixelRatio;
    ctx.strokeStyle = colour('bad');
    ctx.lineWidth = Math.max(1, devicePixelRatio);
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(u.bbox.left, y);
    ctx.lineTo(u.bbox.left + u.bbox.width, y);
    ctx.stroke();
    ctx.fillStyle = colour('bad');
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = 'right';
    ctx.textBaseline = 'bottom';
    ctx.fillText(`bound ${this.bound}`, u.bbox.left + u.bbox.width - 4, y - 3 * devicePixelRatio);
  }
}

/** Cells that are wide enough stand a pixel apart. */
const gap = size => (size > 6 * devicePixelRatio ? devicePixelRatio : 0);

/**
 * Steps as columns of at least MIN_CELL_PX; steps that share one are added up. Four steps in one
 * column, one of them all of staleness 2 and three of staleness 1 -> [[1, 0.75], [2, 0.25]].
 */
function columns(u, rows) {
  const steps = u.data[0];
  const found = [];
  let open = null;
  for (let i = 0; i < steps.length; i += 1) {
    const x0 = u.valToPos(steps[i] - 0.5, 'x', true);
    const x1 = u.valToPos(steps[i] + 0.5, 'x', true);
    if (open && x1 - open.x0 <= MIN_CELL_PX * devicePixelRatio) open.x1 = x1;
    else found.push((open = {x0, x1, counts: new Map(), total: 0}));
    for (const [staleness, count] of rows[i] ?? []) {
      open.counts.set(staleness, (open.counts.get(staleness) ?? 0) + count);
      open.total += count;
    }
  }
  return found.map(({x0, x1, counts, total}) => ({
    x0,
    x1,
    shares: [...counts].map(([staleness, count]) => [staleness, count / total]),
  }));
}

const parse = text =>
  text
    .match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);

function between(low, high, share) {
  const mixed = low.map((value, i) => Math.round(value + (high[i] - value) * share ** 0.7));
  return `rgb(${mixed.join(' ')})`;
}
