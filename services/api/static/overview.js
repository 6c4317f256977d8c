/** Progress, tiles, engines, buffer: the numbers of now. */

import {at, make, place, say} from './dom.js';
import {
  DASH,
  bytes,
  duration,
  fixed,
  milliseconds,
  percent,
  plural,
  significant,
  whole,
} from './format.js';

const PAUSED = 'paused';

/** Phases as they are called in the API -> the colour of the pill. */
const kindOf = phase => (phase === 'done' ? 'done' : phase === PAUSED ? PAUSED : '');

export function showProgress({run, replay}) {
  document.title = run.name ? `${run.name} – Leeway` : 'Leeway';
  say(at('run-name'), run.name);
  const isPaused = replay?.admission_paused && run.phase !== 'done';
  const phase = run.phase.replaceAll('-', ' ');
  say(at('phase'), isPaused ? `${phase}, admission paused` : phase);
  at('phase').dataset.kind = isPaused ? PAUSED : kindOf(run.phase);
  say(at('step-now'), stepWords(run));
  say(at('step-total'), run.num_steps === null ? '' : `of ${whole(run.num_steps)}`);
  say(
    at('version'),
    run.policy_version === null ? '' : `policy version ${whole(run.policy_version)}`,
  );
  say(at('elapsed'), run.elapsed_s > 0 ? `running for ${duration(run.elapsed_s)}` : '');
  const bar = at('bar');
  bar.max = run.num_steps ?? 1;
  bar.value = Math.min(run.step, bar.max);
  say(at('last-event'), run.last_event ?? '');
}

const stepWords = ({name, step}) =>
  step > 0 ? `Step ${whole(step)}` : name ? 'No step yet' : 'Nothing known yet';

export function showTiles(status) {
  const {learning, staleness, eval: heldOut} = status;
  place(
    at('tiles'),
    ...[
      tile('Reward', fixed(learning.reward), 'last batch'),
      tile('Exact match', fixed(learning.exact_match), 'last batch'),
      tile('Held-out match', fixed(heldOut.latest ?? heldOut.before), ...change(heldOut)),
      tile('Staleness', fixed(staleness.mean, 1), stalenessNote(staleness)),
      tile(
        'Clipped tokens',
        percent(learning.clip_fraction),
        `‖C‖ ${significant(learning.clip_bias_norm)}`,
      ),
      tile('Entropy', fixed(learning.entropy), `KL ${significant(learning.kl)}`),
      tile('Generated', whole(status.generated_tokens_per_s), 'tokens/s'),
      tile('Trained', whole(learning.tokens_per_s), 'tokens/s'),
    ],
  );
}

function tile(label, value, note, kind = '') {
  return make(
    'div',
    {class: 'tile'},
    make('dt', {}, label),
    make('dd', {class: value === DASH ? 'unknown' : null}, value),
    make('small', {class: kind}, note),
  );
}

function change({before, latest, latest_step: step}) {
  if (before === null) return ['not measured yet'];
  if (latest === null) return ['before training'];
  const by = latest - before;
  const kind = by > 0 ? 'good' : by < 0 ? 'bad' : '';
  return [`${by >= 0 ? '+' : '−'}${fixed(Math.abs(by))} by step ${whole(step)}`, kind];
}

function stalenessNote({max, bound}) {
  if (max === null) return 'versions';
  return bound === null
    ? `at most ${whole(max)} versions`
    : `at most ${whole(max)}, bound ${whole(bound)}`;
}

export function showEngines(status) {
  const {engines, run} = status;
  if (!engines.length) {
    place(at('engines'), make('p', {class: 'empty'}, 'No engine has reported yet.'));
    return;
  }
  const head = make(
    'tr',
    {},
    make('th', {scope: 'col'}, 'engine'),
    ...['version', 'pause', 'transfer', 'tokens/s'].map(name =>
      make('th', {scope: 'col', class: 'number'}, name),
    ),
  );
  const rows = engines.map(engine =>
    make(
      'tr',
      {},
      make('td', {}, engine.engine_id),
      versionCell(engine.version, run.policy_version),
      cell(milliseconds(engine.pause_ms)),
      cell(milliseconds(engine.transfer_ms)),
      cell(whole(engine.tokens_per_s)),
    ),
  );
  place(
    at('engines'),
    make(
      'div',
      {class: 'scroll'},
      make('table', {}, make('thead', {}, head), make('tbody', {}, ...rows)),
    ),
  );
}

const cell = text => make('td', {class: 'number'}, text);

function versionCell(version, newest) {
  if (version === null) return cell(DASH);
  const behind = newest === null ? 0 : newest - version;
  const note = behind > 0 ? make('span', {class: 'behind'}, ` −${behind}`) : null;
  const title = behind > 0 ? `${plural(behind, 'version')} behind the learner` : 'up to date';
  return make('td', {class: 'number', title}, whole(version), note);
}

export function showBuffer({replay}) {
  if (!replay) {
    place(at('buffer'), make('p', {class: 'empty'}, 'The buffer has not answered yet.'));
    return;
  }
  const reasons = Object.entries(replay.dropped)
    .sort(([, a], [, b]) => b - a)
    .map(([why, count]) => `${whole(count)} ${why}`);
  const facts = [
    ['groups in play', whole(replay.num_slots)],
    ['ready to be drawn', whole(replay.num_ready)],
    ['at the learner', whole(replay.num_leased)],
    ['held back until needed', whole(replay.num_held_back)],
    ['size', bytes(replay.num_bytes)],
    ['trained', whole(replay.num_trained)],
    ['dropped', reasons.length ? `${whole(replay.num_dropped)}: ${reasons.join(', ')}` : '0'],
  ];
  place(
    at('buffer'),
    make(
      'dl',
      {class: 'facts-list'},
      ...facts.flatMap(([name, value]) => [make('dt', {}, name), make('dd', {}, value)]),
    ),
  );
}

const WHOM = {
  rollout: 'the rollouts',
  learner: 'the learner',
  engines: 'the engines',
  operator: 'an operator',
  nobody: 'nobody: a standstill',
};

export function showWaits({waits, replay}) {
  say(at('waits'), waits.sentence ? `In the last half minute: ${waits.sentence}.` : '');
  const links = (replay?.waits ?? []).map(link => {
    const who =
      link.waiter === 'rollout' ? plural(link.num_waiting, 'rollout worker') : 'The learner';
    const verb = link.waiter === 'rollout' && link.num_waiting !== 1 ? 'wait' : 'waits';
    return make(
      'li',
      {},
      `${who} ${verb} for ${WHOM[link.awaited] ?? link.awaited} ` +
        `(${link.reason}), for ${duration(link.since_s)} now`,
    );
  });
  if (waits.refusal) links.push(make('li', {}, `Last refusal: ${waits.refusal}`));
  place(at('wait-list'), ...links);
}
