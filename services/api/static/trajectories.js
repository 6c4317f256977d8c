/** The last trajectories: a list, and one of them turn by turn. */

import {at, make, place} from './dom.js';
import {DASH, fixed, plural, whole} from './format.js';
import {passagesOf, piecesOf} from './text.js';

const PAGE = 20;
const MAX_LISTED = 200;

const LEGEND = [
  ['thought', 'thought'],
  ['search', 'search'],
  ['answer', 'answer'],
  ['observed', 'passage, not trained'],
];

export class Trajectories {
  constructor() {
    this.clear();
    at('trajectory-legend').append(
      ...LEGEND.map(([kind, name]) => make('span', {class: `chip ${kind}`}, name)),
    );
    at('more-trajectories').addEventListener('click', () => this.more());
  }

  clear() {
    this.items = [];
    this.cursor = null;
    this.current = null;
    this.client = null;
    this.draw();
    this.explain('The first one that is played is shown here, turn by turn.');
  }

  /** Read the newest page; what is listed already stays. Throws ApiError. */
  async load(client) {
    this.client = client;
    const page = await client.get('trajectories', {limit: PAGE});
    const isFirst = this.items.length === 0;
    page.items.toReversed().forEach(item => this.take(item));
    if (isFirst) this.cursor = page.next ?? null;
    this.draw();
    if (this.current === null && this.items.length) this.select(this.items[0].trajectory_id, false);
  }

  async more() {
    try {
      const page = await this.client.get('trajectories', {limit: PAGE, cursor: this.cursor});
      const known = new Set(this.items.map(item => item.trajectory_id));
      this.items.push(...page.items.filter(item => !known.has(item.trajectory_id)));
      this.cursor = this.items.length < MAX_LISTED ? (page.next ?? null) : null;
      this.draw();
    } catch (error) {
      this.explain(`The older ones cannot be read: ${error.message}`);
    }
  }

  /** Put one at the head of the list, as an event brings it. */
  take(item) {
    if (this.items.some(known => known.trajectory_id === item.trajectory_id)) return;
    this.items.unshift(item);
    this.items.length = Math.min(this.items.length, MAX_LISTED);
  }

  /** One more was played: list it. */
  arrive(item) {
    this.take(item);
    this.draw();
    if (this.current === null) this.select(item.trajectory_id, false);
  }

  draw() {
    at('more-trajectories').hidden = this.cursor === null;
    if (!this.items.length) {
      place(at('trajectory-list'), make('li', {class: 'empty'}, 'None yet.'));
      return;
    }
    const focused = document.activeElement?.dataset?.trajectory;
    place(at('trajectory-list'), ...this.items.map(item => this.entry(item)));
    if (focused) this.buttonOf(focused)?.focus({preventScroll: true});
  }

  buttonOf(id) {
    return [...at('trajectory-list').querySelectorAll('button')].find(
      button => button.dataset.trajectory === id,
    );
  }

  entry(item) {
    const button = make(
      'button',
      {
        type: 'button',
        'data-trajectory': item.trajectory_id,
        'aria-current': item.trajectory_id === this.current ? 'true' : 'false',
      },
      item.question ?? item.question_id,
      make(
        'small',
        {},
        verdict(item),
        ` · ${plural(item.num_turns, 'turn')} · ${item.stop_reason}`,
      ),
    );
    button.addEventListener('click', () => this.select(item.trajectory_id, true));
    return make('li', {}, button);
  }

  async select(id, isAsked) {
    this.current = id;
    for (const button of at('trajectory-list').querySelectorAll('button')) {
      button.setAttribute('aria-current', String(button.dataset.trajectory === id));
    }
    try {
      const one = await this.client.get(`trajectories/${encodeURIComponent(id)}`);
      if (this.current !== id) return;
      at('trajectory').replaceChildren(...pageOf(one));
      at('trajectory').scrollTop = 0;
      if (isAsked) at('trajectory').focus({preventScroll: innerWidth > 760});
    } catch (error) {
      if (this.current === id) this.explain(`The trajectory cannot be read: ${error.message}`);
    }
  }

  explain(text) {
    at('trajectory').replaceChildren(make('p', {class: 'empty'}, text));
  }
}

const verdict = item =>
  item.is_failed
    ? make('span', {class: 'wrong'}, 'wrong')
    : make('span', {class: 'right'}, 'right');

/** One trajectory as elements: head, prompt, turns. */
export function pageOf(one) {
  const scores = Object.entries(one.scores).map(([name, value]) => `${name} ${fixed(value, 2)}`);
  const facts = make(
    'p',
    {class: 'facts'},
    verdict(one),
    ` · reward ${fixed(one.reward, 2)}` +
      ` · ended by ${one.stop_reason} · ${plural(one.num_tokens, 'token')},` +
      ` ${whole(one.num_trained_tokens)} trained · ${fixed(one.duration_s, 1)} s`,
  );
  return [
    make('h3', {}, one.question ?? one.question_id),
    one.golden_answers.length
      ? make('p', {class: 'facts'}, 'Right: ', make('b', {}, one.golden_answers.join(' or ')))
      : null,
    facts,
    make('p', {class: 'facts'}, scores.join(' · ')),
    prompt(one.prompt),
    ...one.turns.map((turn, k) => turnBlock(turn, k)),
  ].filter(Boolean);
}

function prompt(text) {
  return make(
    'details',
    {class: 'block'},
    make('summary', {}, 'Prompt, not trained'),
    make('div', {class: 'words prompt'}, text),
  );
}

function turnBlock(turn, k) {
  const head = make(
    'h4',
    {},
    `Turn ${k + 1}: ${turn.action} `,
    make(
      'span',
      {},
      `${plural(turn.num_generated, 'token')} generated${versions(turn)}` +
        `${turn.reward === null ? '' : ` · reward ${fixed(turn.reward, 2)}`}`,
    ),
  );
  const words = make('div', {class: 'words'});
  piecesOf(turn.generated).forEach(({kind, text}, i) => {
    words.append(i ? '\n' : '', kind === 'plain' ? text : make('mark', {class: kind}, text));
  });
  if (!turn.generated.trim()) words.append(DASH);
  return make('section', {class: 'block'}, head, words, observed(turn));
}

function versions({oldest_version: low, newest_version: high}) {
  if (low === null || low === undefined) return '';
  return low === high ? ` · version ${low}` : ` · versions ${low} to ${high}`;
}

function observed(turn) {
  const passages = passagesOf(turn.observed);
  if (!passages.length) return null;
  const isList = passages[0].title !== null;
  const title = isList ? `${plural(passages.length, 'passage')} found` : 'Observed';
  return make(
    'details',
    {open: !isList},
    make(
      'summary',
      {},
      `${title}, ${plural(turn.num_observed, 'token')}, not trained` +
        `${isList ? `: ${passages.map(passage => passage.title ?? '?').join(' · ')}` : ''}`,
    ),
    ...passages.map(passage =>
      make(
        'div',
        {class: 'words observed'},
        passage.title === null ? null : make('b', {}, `${passage.title}\n`),
        passage.text,
      ),
    ),
  );
}
