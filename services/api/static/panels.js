/** The charts of the page, each in a card with its legend; the legend tells the step pointed at. */

import {Plot} from './charts.js';
import {at, make, say} from './dom.js';
import {DASH, fixed, percent, significant, whole} from './format.js';
import {StalenessMap} from './heatmap.js';

const unit = () => [0, 1];
const fromZero = least => (u, low, high) => [0, Math.max(least, (high ?? 0) * 1.08)];

/** A card of `charts` with a title, a legend and `count` holders of plots. */
function card(title, legend, names) {
  const id = `chart-${title.toLowerCase().replace(/\W+/g, '-')}`;
  const holders = names.map(name => [
    name ? make('p', {class: 'plot-title'}, name) : null,
    make('div', {class: names.length > 1 ? 'plot short' : 'plot'}),
  ]);
  at('charts').append(
    make(
      'section',
      {class: 'card', 'aria-labelledby': id},
      make('div', {class: 'chart-head'}, make('h2', {id}, title), legend),
      ...holders.flat(),
    ),
  );
  return holders.map(([, holder]) => holder);
}

/** One entry of a legend: the key, the name and a value that changes. */
function entry(kind, name) {
  const value = make('b', {}, DASH);
  return {value, node: make('span', {}, kind ? make('i', {class: kind}) : null, `${name} `, value)};
}

const legendOf = entries => make('p', {class: 'legend'}, ...entries.map(({node}) => node));

/** Lines over steps: `read` are functions of a metrics line, one for each series. */
class LinePanel {
  constructor(title, lines, plots) {
    this.entries = lines.map(({kind, name}) => entry(kind, name));
    this.lines = lines;
    const holders = card(
      title,
      legendOf(this.entries),
      plots.map(plot => plot.name),
    );
    this.plots = plots.map((plot, i) => ({
      members: plot.members,
      plot: new Plot(holders[i], {
        series: plot.members.map(member => lines[member].look),
        range: plot.range,
        format: plot.format,
        onPlace: index => this.tell(index),
      }),
    }));
  }

  show(store) {
    this.steps = store.steps;
    const values = this.lines.map(({read}) => read(store));
    this.values = values;
    const steps = store.steps.map(line => line.step);
    for (const {members, plot} of this.plots) plot.show([steps, ...members.map(i => values[i])]);
    this.tell(null);
  }

  /** Show the values of the step at `index`, or the last known ones. */
  tell(index) {
    this.entries.forEach(({value}, i) => {
      const found =
        index === null
          ? this.values?.[i].findLast(number => number !== null)
          : this.values?.[i][index];
      say(value, this.lines[i].format(found ?? null));
    });
  }

  recolour() {
    for (const {plot} of this.plots) plot.recolour();
  }
}

const solid = {colour: 'line-a'};
const dashed = {colour: 'line-b', dash: [6, 4]};
const dots = {colour: 'line-c', points: true};
const each = name => store => store.steps.map(line => line[name]);
const heldOut = store => store.steps.map(line => store.heldOut.get(line.step) ?? null);

class StalenessPanel {
  constructor() {
    this.words = make('p', {class: 'legend'});
    this.text = make('span', {});
    this.words.append(
      this.text,
      make('span', {}, make('i', {class: 'key-heat'}), 'share of a batch'),
    );
    const [holder] = card('Staleness', this.words, [null]);
    this.map = new StalenessMap(holder, index => this.tell(index));
  }

  show(store) {
    this.steps = store.steps;
    this.map.show(store.steps, store.status.staleness.bound);
    this.tell(null);
  }

  tell(index) {
    const line = index === null ? this.steps?.at(-1) : this.steps?.[index];
    if (!line) {
      say(this.text, 'versions');
      return;
    }
    const counts = line.staleness;
    const total = counts.reduce((sum, [, count]) => sum + count, 0);
    const parts = counts
      .toSorted(([, a], [, b]) => b - a)
      .slice(0, 3)
      .map(([staleness, count]) => `${whole(staleness)}: ${percent(count / total)}`);
    say(
      this.text,
      `step ${whole(line.step)} · ${parts.join(', ')}${counts.length > 3 ? ' …' : ''}`,
    );
  }

  recolour() {
    this.map.recolour();
  }
}

/** Make the cards; each has show(store) and recolour(). */
export function buildPanels() {
  return [
    new LinePanel(
      'Reward and exact match',
      [
        {
          kind: 'key-a',
          name: 'reward',
          look: solid,
          format: value => fixed(value),
          read: each('reward'),
        },
        {
          kind: 'key-b',
          name: 'exact match',
          look: dashed,
          format: value => fixed(value),
          read: each('exactMatch'),
        },
        {kind: 'key-c', name: 'held out', look: dots, format: value => fixed(value), read: heldOut},
      ],
      [{members: [0, 1, 2], range: unit, format: significant}],
    ),
    new StalenessPanel(),
    new LinePanel(
      'Clipping',
      [
        {
          kind: 'key-a',
          name: 'clipped tokens',
          look: solid,
          format: percent,
          read: each('clipped'),
        },
        {kind: 'key-b', name: '‖C‖', look: dashed, format: significant, read: each('clipBias')},
      ],
      [
        {
          name: 'Share of tokens that were clipped',
          members: [0],
          range: fromZero(0.01),
          format: percent,
        },
        {
          name: '‖C‖, norm of what the clip removed',
          members: [1],
          range: fromZero(1e-3),
          format: significant,
        },
      ],
    ),
    new LinePanel(
      'Tokens per second',
      [
        {kind: 'key-a', name: 'generated', look: solid, format: whole, read: each('generated')},
        {kind: 'key-b', name: 'trained', look: dashed, format: whole, read: each('trained')},
      ],
      [{members: [0, 1], range: fromZero(10), format: whole}],
    ),
  ];
}
