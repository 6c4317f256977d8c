/**
 * Server-sent events through fetch: EventSource cannot send the token.
 *
 * A stream that breaks, ends or falls silent is opened again from the last id that was read, after
 * a pause that doubles up to MAX_PAUSE_S.
 */

import {ApiError, problemOf, reached} from './client.js';

export const FIRST_PAUSE_S = 0.5;
export const MAX_PAUSE_S = 15;
/** The server writes a comment at least every 15 s; a stream this silent is dead. */
export const SILENT_S = 40;

/** Takes text as it comes and hands on whole events: {id, type, data, retry}. */
export class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = '';
    this.clear();
  }

  clear() {
    this.data = [];
    this.type = '';
    this.id = undefined;
  }

  push(text) {
    this.rest += text;
    // A carriage return at the end may be the first half of a line's end.
    const isHalf = this.rest.endsWith('\r');
    const lines = (isHalf ? this.rest.slice(0, -1) : this.rest).split(/\r\n|\n|\r/);
    this.rest = lines.pop() + (isHalf ? '\r' : '');
    for (const line of lines) this.line(line);
  }

  line(line) {
    if (line === '') {
      if (this.data.length || this.id !== undefined) {
        this.onEvent({id: this.id, type: this.type || 'message', data: this.data.join('\n')});
      }
      this.clear();
      return;
    }
    const colon = line.indexOf(':');
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (name === 'data') this.data.push(value);
    else if (name === 'event') this.type = value;
    else if (name === 'id' && !value.includes('\0')) this.id = value;
  }
}

/** Seconds before attempt `count` (from 0), before chance: 0.5, 1, 2, 4, 8, 15, 15, ... */
export const pauseOf = count => Math.min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** Math.min(count, 10));

/**
 * Follow v1/events until `signal` ends it.
 *
 * onEvent({id, type, data}); onState(state, {error, inS}): `connecting`, `live`, `waiting` (for the
 * next attempt, in `inS` seconds) or `refused` (the token; following is over).
 */
export async function follow({client, lastId, onEvent, onState, signal}) {
  let last = lastId;
  let failures = 0;
  const take = event => {
    if (event.id) last = event.id;
    try {
      onEvent(event);
    } catch (error) {
      // One that cannot be shown does not keep the page from those behind it.
      console.error('an event is not shown', event.type, error);
    }
  };
  while (!signal.aborted) {
    onState('connecting', {});
    const error = await problemOfStream({
      client,
      last,
      signal,
      onEvent: take,
      onOpen: () => {
        failures = 0;
        onState('live', {});
      },
    });
    if (signal.aborted) return;
    if (error.isRefused) {
      onState('refused', {error});
      return;
    }
    // By chance up to a quarter longer, so that a thousand pages do not come back at once.
    const inS = (error.retryAfterS ?? pauseOf(failures)) * (1 + Math.random() / 4);
    failures += 1;
    onState('waiting', {error, inS});
    await pause(inS, signal);
  }
}

async function problemOfStream(options) {
  try {
    return await readStream(options);
  } catch (error) {
    // Whatever it was, following goes on.
    return error instanceof ApiError ? error : new ApiError(0, `the stream broke: ${error.message}`);
  }
}

/** One stream, until it ends. Throws ApiError, also when it ends without a word. */
async function readStream({client, last, signal, onOpen, onEvent}) {
  const silence = new AbortController();
  const end = () => silence.abort();
  signal.addEventListener('abort', end);
  let watch = setTimeout(end, SILENT_S * 1000);
  try {
    const headers = client.headers({Accept: 'text/event-stream'});
    if (last) headers['Last-Event-ID'] = last;
    const answer = await reached(
      fetch('v1/events', {headers, cache: 'no-store', signal: silence.signal}),
    );
    if (!answer.ok) throw await problemOf(answer);
    onOpen();
    const parser = new EventParser(onEvent);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const {value, done} = await reached(reader.read());
      if (done) throw new ApiError(0, 'the stream ended');
      clearTimeout(watch);
      watch = setTimeout(end, SILENT_S * 1000);
      parser.push(value);
    }
  } finally {
    clearTimeout(watch);
    signal.removeEventListener('abort', end);
  }
}

/** Waits; ends at once when the signal does, or when the page is looked at or online again. */
export function pause(seconds, signal) {
  return new Promise(resolve => {
    const timer = setTimeout(done, seconds * 1000);
    const wake = () => {
      if (document.visibilityState === 'visible') done();
    };
    function done() {
      clearTimeout(timer);
      signal.removeEventListener('abort', done);
      removeEventListener('online', wake);
      document.removeEventListener('visibilitychange', wake);
      resolve();
    }
    signal.addEventListener('abort', done);
    addEventListener('online', wake);
    document.addEventListener('visibilitychange', wake);
  });
}
