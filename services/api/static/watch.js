/** What the watchdog of the run sees: the chain of waits, how long each stage has stood still, and
 * which event loops wake late. */

import {at, make, place, say} from './dom.js';
import {duration, fixed} from './format.js';

/** A stage that has used up so much of its deadline stands out. */
const OVERDUE_SHARE = 0.25;
/** An event loop that woke so late stands out. */
const LATE_S = 0.25;
/** Its loop computes its steps, so it is late by one. */
const COMPUTES = 'learner';

export function showWatch({watchdog, loops}) {
  say(at('chain'), watchdog ? asSentence(watchdog.waits) : '');
  say(at('verdict'), watchdog?.verdict ? `The watchdog ended the run: ${watchdog.verdict}` : '');
  place(at('stages'), ...(watchdog?.stages ?? []).flatMap(stageFacts));
  const latestFirst = [...loops].sort((a, b) => b.lag_s - a.lag_s);
  place(
    at('event-loops'),
    ...(loops.length ? ['Event loops woke late by at most ', ...joined(latestFirst)] : []),
  );
}

const asSentence = text => (text ? `${text[0].toUpperCase()}${text.slice(1)}.` : '');

function stageFacts({name, idle_s: idle, deadline_s: deadline}) {
  return [
    make('dt', {}, `${name} without progress for`),
    make(
      'dd',
      {class: idle > OVERDUE_SHARE * deadline ? 'behind' : null},
      `${duration(idle)} of ${duration(deadline)}`,
    ),
  ];
}

const joined = loops =>
  loops.flatMap(({process, lag_s: lag}, i) => [
    i ? ', ' : '',
    make('span', {class: lag >= LATE_S && process !== COMPUTES ? 'behind' : null}, `${fixed(lag, 2)} s (${process})`),
  ]);
