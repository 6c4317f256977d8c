/** Line charts over optimizer steps. The only file that imports uPlot. */

import uPlot from './vendor/uPlot.esm.js';
import {make} from './dom.js';

const SYNC = 'steps';
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const STEP_AXIS = 26;
const VALUE_AXIS = 50;
/** Distances between ticks that count something. */
export const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];

/** A colour of the style sheet as it is now, for a canvas, which knows no variables. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
const probe = document.createElement('i');
probe.hidden = true;
document.body.append(probe);

/**
 * One plot in `holder`, as wide and as high as it is.
 *
 * series: [{colour, dash?, points?}] in the order of the data behind the steps, or [{isHidden}] for
 * values that `hooks` paint. range, margin: what uPlot takes for y; how far x reaches beyond the
 * first and the last step. onPlace(index): the step that is pointed at, null for none.
 */
export class Plot {
  constructor(
    holder,
    {
      series,
      range,
      format,
      increments,
      margin = 0,
      hooks = {},
      hasGrid = true,
      canZoom = true,
      onPlace,
    },
  ) {
    this.holder = holder;
    this.empty = make('p', {class: 'empty'}, 'No step yet');
    this.span = (u, low, high) => stepSpan(low, high, margin);
    const grid = {show: hasGrid, stroke: () => colour('rule'), width: 1};
    this.options = {
      legend: {show: false},
      cursor: {
        sync: {key: SYNC, setSeries: false},
        drag: {x: canZoom, y: false},
        points: {show: hasGrid, size: 7, width: 0, fill: (u, i) => colour(series[i - 1].colour)},
      },
      padding: [8, 24, 0, 0],
      scales: {x: {time: false, range: this.span}, y: {range}},
      axes: [
        axis({
          size: STEP_AXIS,
          space: 60,
          incrs: WHOLE,
          grid,
          values: (u, ticks) => ticks.map(whole),
        }),
        axis({
          size: VALUE_AXIS,
          space: 30,
          incrs: increments,
          grid,
          values: (u, ticks) => ticks.map(format),
        }),
      ],
      series: [{}, ...series.map(line)],
      hooks: {...hooks, setCursor: [u => onPlace?.(u.cursor.idx ?? null)]},
    };
    this.plot = null;
    holder.append(this.empty);
    new ResizeObserver(() => this.fit()).observe(holder);
  }

  /** data: [steps, values of the first series, ...]; null where a value is not known. */
  show(data) {
    const hasData = data[0].length > 0;
    this.empty.hidden = hasData;
    if (!hasData) {
      this.plot?.destroy();
      this.plot = null;
      return;
    }
    if (this.plot) this.plot.setData(data, this.isWhole());
    else this.plot = new uPlot({...this.options, ...this.size()}, data, this.holder);
  }

  /** Whether nobody has zoomed in: then new steps widen the plot. */
  isWhole() {
    const {min, max} = this.plot.scales.x;
    const steps = this.plot.data[0];
    const [first, last] = this.span(null, steps[0], steps.at(-1));
    return min === first && max === last;
  }

  size() {
    return {width: Math.max(200, this.holder.clientWidth), height: this.holder.clientHeight};
  }

  fit() {
    this.plot?.setSize(this.size());
  }

  /** Draw again with the colours of now. */
  recolour() {
    this.plot?.redraw(false, true);
  }
}

const whole = value => value.toLocaleString('en-GB', {maximumFractionDigits: 0});

/** A run of one step still has a width. */
function stepSpan(low, high, margin) {
  if (low === null || low === undefined) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low - margin, high + margin];
}

function line({colour: name, dash, points, isHidden}) {
  if (isHidden) return {paths: () => null, points: {show: false}};
  if (points) {
    return {paths: () => null, points: {show: true, size: 8, width: 0, fill: () => colour(name)}};
  }
  return {
    stroke: () => colour(name),
    width: 2,
    dash,
    spanGaps: true,
    points: {show: isAlone, size: 5, fill: () => colour(name)},
  };
}

/** A series of few values is shown as points too: a line through one point cannot be seen. */
const isAlone = (u, i) => u.data[i].filter(value => value !== null).length <= 2;

function axis(more) {
  return {
    stroke: () => colour('muted'),
    font: FONT,
    gap: 6,
    ticks: {show: false},
    border: {show: false},
    ...more,
  };
}
