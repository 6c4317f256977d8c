/** The sweeps beside the run: where each stands, and what one has found. */

import {at, draw, make, place, say} from './dom.js';
import {clock, DASH, duration, fixed, percent, plural, significant, whole} from './format.js';
import {isDrawn, mark, NUM_COLOURS, sweepChart} from './sweep_chart.js';

const ASK_AGAIN_MS = 10_000;
const SWEEPS_AT_ONCE = 200;
const ROWS_AT_ONCE = 500;
const HASH = '#sweep=';

const KIND = {done: 'done', running: '', scanning: '', stopped: 'paused', interrupted: 'bad'};
/** Every item of a list, page by page. */
async function readAll(client, path, limit) {
  const found = [];
  for (let cursor = null; ; ) {
    const page = await client.get(path, {cursor, limit});
    found.push(...page.items);
    cursor = page.next;
    if (cursor === null) return found;
  }
}

export class Sweeps {
  constructor() {
    this.client = null;
    this.items = [];
    this.current = null;
    this.shown = null; // of the current one: {detail, rows}
    this.hidden = new Set();
    this.timer = null;
    this.watch = 0; // counts who looks, so that only the newest does
    addEventListener('hashchange', () => this.followHash(true));
    new ResizeObserver(() => this.drawChart()).observe(at('sweep'));
  }

  /** Begin to look at the sweeps that this client may see, and go on while the page is seen. */
  allow(client) {
    this.client = client;
    clearTimeout(this.timer);
    this.watch += 1;
    this.look(this.watch);
  }

  async look(watch) {
    if (document.visibilityState === 'visible') {
      try {
        const items = await readAll(this.client, 'sweeps', SWEEPS_AT_ONCE);
        if (watch !== this.watch) return;
        await this.take(items.sort((a, b) => b.updated_at - a.updated_at));
      } catch (error) {
        if (watch !== this.watch || error.isRefused) return;
        // The page says elsewhere that the API is away; what is shown is the last known state.
        if (error.status) this.explain(`The sweeps cannot be read: ${error.message}`);
      }
    }
    if (watch === this.watch) this.timer = setTimeout(() => this.look(watch), ASK_AGAIN_MS);
  }

  async take(items) {
    this.items = items;
    at('sweeps').hidden = items.length === 0;
    this.drawList();
    if (!items.some(item => item.name === this.current)) this.current = null;
    if (this.current === null) return this.followHash(false);
    const now = items.find(item => item.name === this.current);
    if (now.updated_at !== this.shown?.detail.status.updated_at) await this.read();
    return undefined;
  }

  /** Show the sweep that the address names, else the one that changed last and has found something. */
  async followHash(isAsked) {
    const named = location.hash.startsWith(HASH)
      ? decodeURIComponent(location.hash.slice(HASH.length))
      : null;
    const found = this.items.find(item => item.num_ended > 0) ?? this.items[0];
    const name = this.items.find(item => item.name === named)?.name ?? found?.name;
    if (isAsked && name !== named) return;
    if (name === undefined || (name === this.current && !isAsked)) return;
    this.current = name;
    this.shown = null;
    this.hidden.clear();
    this.drawList();
    await this.read();
    if (named === name) at('sweep').focus({preventScroll: innerWidth > 760 && isAsked});
  }

  async read() {
    const {client, current: name} = this;
    const path = `sweeps/${encodeURIComponent(name)}`;
    try {
      const detail = await client.get(path);
      const rows = await readAll(client, `${path}/rows`, ROWS_AT_ONCE);
      if (client !== this.client || name !== this.current) return;
      this.shown = {detail, rows};
      this.draw();
    } catch (error) {
      if (client === this.client && name === this.current) {
        this.explain(`The sweep ${name} cannot be read: ${error.message}`);
      }
    }
  }

  explain(text) {
    if (this.shown === null) at('sweep').replaceChildren(make('p', {class: 'empty'}, text));
  }

  drawList() {
    const focused = document.activeElement?.dataset?.sweep;
    place(at('sweep-list'), ...this.items.map(item => entry(item, item.name === this.current)));
    if (focused) {
      at('sweep-list').querySelector(`[data-sweep="${focused}"]`)?.focus({preventScroll: true});
    }
  }

  draw() {
    const {detail, rows} = this.shown;
    const wasOpen = at('sweep-runs')?.open ?? false;
    this.series = seriesOf(detail.points);
    at('sweep').replaceChildren(
      ...[
        head(detail),
        verdicts(detail),
        detail.points.some(isDrawn) ? this.figure() : null,
        rows.length ? runs(rows, this.series, wasOpen) : null,
      ].filter(Boolean),
    );
    this.drawChart();
  }

  figure() {
    const keys = this.series.map(({name, number}) => {
      const key = make(
        'button',
        {type: 'button', class: 'key', 'aria-pressed': String(!this.hidden.has(name))},
        swatch(number),
        name,
      );
      key.addEventListener('click', () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        key.setAttribute('aria-pressed', String(!this.hidden.has(name)));
        this.drawChart();
      });
      return key;
    });
    return make(
      'figure',
      {},
      make(
        'figcaption',
        {},
        'Held-out exact match against realised staleness; bars are 95 % intervals over seeds',
      ),
      make('div', {id: 'sweep-chart'}),
      make('p', {id: 'sweep-point', class: 'quiet', role: 'status'}),
      make('div', {class: 'keys', role: 'group', 'aria-label': 'Series shown'}, ...keys),
    );
  }

  drawChart() {
    const holder = at('sweep-chart');
    if (!holder || !holder.clientWidth) return;
    holder.replaceChildren(
      sweepChart({
        width: holder.clientWidth,
        series: this.series.filter(({name}) => !this.hidden.has(name)),
        all: this.shown.detail.points,
        onPoint: text => say(at('sweep-point'), text ?? ''),
      }),
    );
  }
}

/** Points by series, in their order: [{name, number, points}]. */
export function seriesOf(points) {
  const names = [...new Set(points.map(point => point.series))];
  return names.map((name, number) => ({
    name,
    number,
    points: points.filter(point => point.series === name),
  }));
}

function entry(item, isCurrent) {
  const bar = {max: Math.max(1, item.num_arms), value: item.num_ended};
  return make(
    'li',
    {},
    make(
      'a',
      {
        href: `${HASH}${encodeURIComponent(item.name)}`,
        'data-sweep': item.name,
        'aria-current': String(isCurrent),
      },
      make('span', {class: 'sweep-name'}, item.name),
      make('span', {class: 'pill', 'data-kind': KIND[item.phase] ?? ''}, item.phase),
      make('progress', {...bar, 'aria-label': `Runs of ${item.name} that have ended`}),
      make('small', {}, countsOf(item)),
    ),
  );
}

/** "24 of 32 runs ended · 2 collapsed · 1 failed" */
export function countsOf(item) {
  return [
    `${whole(item.num_ended)} of ${plural(item.num_arms, 'run')} ended`,
    item.num_collapsed ? `${whole(item.num_collapsed)} collapsed` : null,
    item.num_failed ? `${whole(item.num_failed)} failed` : null,
  ]
    .filter(Boolean)
    .join(' · ');
}

const MODE = {
  exact: 'every trained token exactly so many versions old',
  bound: 'the live loop under a bound',
};

function head({status, mode}) {
  const rates = Object.entries(status.rates).map(([name, rate]) => `${name} ${rate}`);
  const lines = [
    `${mode}: ${MODE[mode] ?? ''} · last change ${clock(status.updated_at)}`,
    rates.length ? `Learning rates of the scan: ${rates.join(', ')}` : null,
    status.running.length ? `Running now: ${status.running.join(', ')}` : null,
  ];
  return make(
    'header',
    {},
    make('h3', {}, status.name),
    ...lines.filter(Boolean).map(line => make('p', {class: 'facts'}, line)),
  );
}

function verdicts({verdicts: found, status}) {
  if (!found.length) {
    const text = status.phase === 'scanning' ? 'The scan of learning rates goes on.' : '';
    return make('p', {class: 'empty'}, `No run of the grid has ended yet. ${text}`);
  }
  return make('ul', {class: 'verdicts'}, ...found.map(one => make('li', {}, one.sentence)));
}

const COLUMNS = [
  ['staleness', row => fixed(row.staleness, 2)],
  ['score', row => fixed(row.score)],
  ['before', row => fixed(row.score_before)],
  ['best', row => fixed(row.score_best)],
  ['steps', row => whole(row.steps)],
  ['time', row => duration(row.wall_s)],
  ['learning rate', row => String(row.learning_rate)],
  ['clipped tokens', row => percent(row.clip_fraction_tokens)],
  ['mean ‖C‖', row => significant(row.ctn_norm)],
  ['mean KL', row => significant(row.kl)],
];

function runs(rows, series, isOpen) {
  const place = new Map(series.map(({name, number}) => [name, number]));
  const inOrder = (a, b) =>
    (place.get(a.series) ?? place.size) - (place.get(b.series) ?? place.size) ||
    a.staleness_set - b.staleness_set ||
    a.seed - b.seed;
  const cell = text => make('td', {class: text === DASH ? 'number quiet' : 'number'}, text);
  const heads = ['run', ...COLUMNS.map(([name]) => name)].map((name, i) =>
    make('th', {scope: 'col', class: i ? 'number' : null}, name),
  );
  const body = rows.toSorted(inOrder).map(row => {
    const name = `${row.series}, seed ${row.seed}${row.is_scan ? ' (scan)' : ''}`;
    const first = make('th', {scope: 'row'}, name);
    if (row.status === 'failed') {
      const why = `set to ${plural(row.staleness_set, 'version')}; failed: ${row.reason ?? ''}`;
      return make('tr', {}, first, make('td', {class: 'bad', colspan: COLUMNS.length}, why));
    }
    if (row.collapse_step !== null) {
      first.append(make('span', {class: 'bad'}, ` collapsed at step ${whole(row.collapse_step)}`));
    }
    return make('tr', {}, first, ...COLUMNS.map(([, read]) => cell(read(row))));
  });
  return make(
    'details',
    {id: 'sweep-runs', open: isOpen},
    make('summary', {}, `Every run that has ended (${whole(rows.length)})`),
    make(
      'div',
      {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Runs of the sweep'},
      make(
        'table',
        {},
        make('thead', {}, make('tr', {}, ...heads)),
        make('tbody', {}, ...body),
      ),
    ),
  );
}

const swatch = number =>
  draw(
    'svg',
    {class: `series-${number % NUM_COLOURS}`, viewBox: '-8 -8 16 16', width: 16, height: 16},
    mark(number),
  );
