/** What the page knows of a run. The parts of the page read it and change nothing. */

/** Newest steps that are kept: as many as the API keeps. */
export const MAX_STEPS = 4096;
export const MAX_EVENTS = 200;

/** What stands on the page before anything is known: dashes. */
const UNKNOWN = {
  run: {
    name: '',
    phase: '',
    elapsed_s: 0,
    step: 0,
    num_steps: null,
    policy_version: null,
    last_event: null,
  },
  engines: [],
  generated_tokens_per_s: null,
  learning: {
    reward: null,
    exact_match: null,
    entropy: null,
    kl: null,
    grad_norm: null,
    clip_fraction: null,
    clip_bias_norm: null,
    tokens_per_s: null,
  },
  staleness: {mean: null, max: null, max_seen: null, bound: null},
  replay: null,
  waits: {learner_for_data: null, rollouts_for_room: null, sentence: '', refusal: null},
  watchdog: null,
  loops: [],
  eval: {before: null, latest: null, latest_step: null},
};

export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    /** The body of v1/status. */
    this.status = UNKNOWN;
    /** What the charts need of each metrics line, in ascending order of the step; see pointOf. */
    this.steps = [];
    /** {event_id, time_s, kind, text}, newest first. */
    this.events = [];
    /** Held-out exact match by step. */
    this.heldOut = new Map();
  }

  get isKnown() {
    return this.status !== UNKNOWN;
  }

  /** Take a status; true if it is of another run than the one before, which is forgotten then. */
  takeStatus(status) {
    const isOther = this.isKnown && this.status.run.name !== status.run.name;
    if (isOther) this.clear();
    this.status = status;
    const {latest, latest_step: step} = status.eval;
    if (latest !== null && step !== null) this.heldOut.set(step, latest);
    return isOther;
  }

  /** Take every held-out evaluation of the run, as v1/learner lists them. */
  takeHeldOut(history) {
    this.heldOut = new Map(history.map(({step, exact_match: score}) => [step, score]));
  }

  /**
   * Take a metrics line. A step that was trained again, as after a resumption, takes the place of
   * the earlier one and of those behind it.
   */
  takeStep(metrics) {
    const line = pointOf(metrics);
    const steps = this.steps;
    let place = steps.length;
    while (place > 0 && steps[place - 1].step > line.step) place -= 1;
    const earlier = steps[place - 1];
    if (earlier?.step !== line.step) steps.splice(place, 0, line);
    else if (line.time > earlier.time) steps.splice(place - 1, Infinity, line);
    if (steps.length > MAX_STEPS) steps.splice(0, steps.length - MAX_STEPS);
  }

  takeEvent(event) {
    if (this.events.some(known => known.event_id === event.event_id)) return;
    this.events.push(event);
    this.events.sort((a, b) => b.time_s - a.time_s || (a.event_id < b.event_id ? 1 : -1));
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
  }

  get lastStep() {
    return this.steps.at(-1) ?? null;
  }
}

const known = value => (typeof value === 'number' && Number.isFinite(value) ? value : null);

/**
 * A metrics line without what is not drawn; null where a number is not known.
 *
 * `staleness`: [[staleness, trajectories], ...] in ascending order.
 */
export function pointOf(metrics) {
  return {
    step: metrics.step,
    time: metrics.time ?? 0,
    reward: known(metrics.reward_mean),
    exactMatch: known(metrics['score/exact_match']),
    clipped: known(metrics.clip_fraction_tokens),
    clipBias: known(metrics.ctn_norm),
    generated: known(metrics.generated_tokens_per_s),
    trained: trainedPerSecond(metrics),
    staleness: stalenessOf(metrics),
  };
}

/** Tokens trained per second of a step, its wait for data included: 100 in 3 s + 1 s -> 25. */
function trainedPerSecond({seconds = 0, wait_s: wait = 0, num_tokens_trained: tokens}) {
  return seconds + wait > 0 && tokens ? tokens / (seconds + wait) : null;
}

function stalenessOf(metrics) {
  const prefix = 'staleness_histogram/';
  return Object.entries(metrics)
    .filter(([name]) => name.startsWith(prefix))
    .map(([name, count]) => [Number(name.slice(prefix.length)), count])
    .sort(([a], [b]) => a - b);
}
