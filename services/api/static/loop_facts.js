/** What the picture of the loop says, read out of the body of v1/status. */

import {DASH, fixed, milliseconds, plural, whole} from './format.js';

/** Below this share nobody calls it waiting. */
const LEAST_SHARE = 0.02;

export function nodes(status) {
  const {replay, waits, run} = status;
  return {
    rollouts: {
      title: 'Rollouts',
      facts: [[replay ? whole(replay.num_slots) : DASH, ' groups in play']],
      share: waits.rollouts_for_room,
    },
    buffer: {
      title: 'Replay buffer',
      facts: [
        [replay ? whole(replay.num_ready) : DASH, ' ready'],
        [replay ? whole(replay.num_leased) : DASH, ' leased'],
        [replay ? whole(replay.num_trained) : DASH, ' trained'],
      ],
    },
    learner: {
      title: 'Learner',
      facts: [[`step ${whole(run.step)}`, run.num_steps ? ` of ${whole(run.num_steps)}` : '']],
      share: waits.learner_for_data,
    },
    engines: {
      title: status.engines.length ? plural(status.engines.length, 'engine') : 'Engines',
      facts: [
        [`version ${versionSpan(status.engines)}`, ''],
        ['', engineLag(status)],
      ],
    },
  };
}

/** "25", "24–26", or a dash. */
function versionSpan(engines) {
  const versions = engines.map(engine => engine.version).filter(version => version !== null);
  if (!versions.length) return DASH;
  const [low, high] = [Math.min(...versions), Math.max(...versions)];
  return low === high ? whole(low) : `${whole(low)}–${whole(high)}`;
}

function engineLag(status) {
  const versions = status.engines.map(engine => engine.version).filter(version => version !== null);
  if (!versions.length || status.run.policy_version === null) return 'no version yet';
  const behind = status.run.policy_version - Math.min(...versions);
  return behind > 0 ? `up to ${behind} behind` : 'up to date';
}

export function flows(status) {
  const {staleness, learning, run, engines} = status;
  const transfer = largest(engines.map(engine => engine.transfer_ms));
  const isMoving = learning.reward !== null && run.phase === 'training';
  const bound = staleness.bound === null ? '' : ` of ${whole(staleness.bound)}`;
  return [
    {from: 'rollouts', to: 'buffer', lines: ['groups', ''], isMoving},
    {
      from: 'buffer',
      to: 'learner',
      isMoving,
      lines: [
        `${whole(learning.tokens_per_s)} tokens/s`,
        `staleness ${fixed(staleness.mean, 1)}${bound}`,
      ],
    },
    {
      from: 'learner',
      to: 'engines',
      isMoving,
      lines: [
        run.policy_version === null ? 'weights' : `weights, version ${whole(run.policy_version)}`,
        transfer === null ? '' : `transfer ${milliseconds(transfer)}`,
      ],
    },
    {
      from: 'engines',
      to: 'rollouts',
      isMoving: status.generated_tokens_per_s > 0,
      lines: [`${whole(status.generated_tokens_per_s)} tokens/s`, 'generated'],
    },
  ];
}

const largest = values => {
  const known = values.filter(value => value !== null);
  return known.length ? Math.max(...known) : null;
};

/** Who waits for whom by share of its time; the reason of now says whom the rollouts wait for. */
export function waitArrows(status) {
  const {rollouts_for_room: room, learner_for_data: data} = status.waits;
  const link = (status.replay?.waits ?? []).find(wait => wait.waiter === 'rollout');
  const target = link?.awaited === 'engines' ? 'engines' : 'learner';
  return [
    room >= LEAST_SHARE ? {from: 'rollouts', to: target, share: room} : null,
    data >= LEAST_SHARE ? {from: 'learner', to: 'rollouts', share: data} : null,
  ].filter(Boolean);
}

/** The picture in one sentence, for who cannot see it. */
export function inWords(status) {
  const {run, replay, waits, watchdog} = status;
  const now = watchdog?.waits ?? waits.sentence;
  const buffer = replay
    ? `${plural(replay.num_slots, 'group')} in play, ${replay.num_ready} ready, ` +
      `${replay.num_leased} at the learner`
    : 'the buffer is not known yet';
  return (
    `Loop at step ${run.step}: ${buffer}; engines at version ${versionSpan(status.engines)}` +
    `${now ? `; ${now}` : ''}.`
  );
}
