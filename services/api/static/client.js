/** Requests to the API of the run. Addresses are relative, so that a proxy may serve it deeper. */

const ANSWER_TIMEOUT_MS = 10_000;
const SCOPE_HEADER = 'Leeway-Scope';

/** An answer that was no success; `status` 0 means that there was no answer at all. */
export class ApiError extends Error {
  constructor(status, detail, retryAfterS = null) {
    super(detail);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }

  /** The token is missing or wrong; asking again without another one is useless. */
  get isRefused() {
    return this.status === 401;
  }
  get isGone() {
    return this.status === 0 || this.status === 502 || this.status === 504;
  }
  /** Nothing is wrong with the request: asked again, it may be answered. */
  get isPassing() {
    return this.isGone || this.status === 429 || this.status === 503;
  }
}

/** What an answer that is no success says: the detail of its problem+json, or its status. */
export async function problemOf(answer) {
  const wait = Number(answer.headers.get('Retry-After'));
  let detail = `${answer.status} ${answer.statusText}`.trim();
  try {
    const body = await answer.json();
    detail = body.detail || body.title || detail;
  } catch {
    /* not JSON: a proxy wrote it */
  }
  return new ApiError(answer.status, detail, Number.isFinite(wait) && wait > 0 ? wait : null);
}

export class Client {
  constructor(token) {
    this.token = token;
    /** "read" or "control", as the API says of the token; null before its first answer. */
    this.scope = null;
  }

  headers(more = {}) {
    return this.token ? {...more, Authorization: `Bearer ${this.token}`} : more;
  }

  /** GET v1/PATH; `query` entries that are null are left out. Throws ApiError. */
  get(path, query = {}) {
    const known = Object.entries(query).filter(
      ([, value]) => value !== null && value !== undefined,
    );
    const search = new URLSearchParams(known).toString();
    return this.ask(search ? `${path}?${search}` : path, {cache: 'no-cache'});
  }

  /** POST v1/PATH. Throws ApiError. */
  post(path, body) {
    const headers = body === undefined ? {} : {'Content-Type': 'application/json'};
    const sent = body === undefined ? undefined : JSON.stringify(body);
    return this.ask(path, {method: 'POST', headers, body: sent});
  }

  /** GET v1/PATH with its ETag: {body, tag}. Throws ApiError. */
  async getTagged(path) {
    return tagged(await this.answer(path, {cache: 'no-cache'}));
  }

  /** PATCH v1/PATH, refused with 412 unless it still has `tag`: {body, tag}. Throws ApiError. */
  async patch(path, body, tag) {
    const headers = {'Content-Type': 'application/json', 'If-Match': tag};
    return tagged(
      await this.answer(path, {method: 'PATCH', headers, body: JSON.stringify(body)}),
    );
  }

  async ask(path, options) {
    const answer = await this.answer(path, options);
    return answer.status === 204 ? null : reached(answer.json());
  }

  async answer(path, options) {
    const signal = AbortSignal.timeout(ANSWER_TIMEOUT_MS);
    const headers = this.headers({Accept: 'application/json', ...options.headers});
    const answer = await reached(fetch(`v1/${path}`, {...options, headers, signal}));
    this.scope = answer.headers.get(SCOPE_HEADER) ?? this.scope;
    if (!answer.ok) throw await problemOf(answer);
    return answer;
  }
}

async function tagged(answer) {
  return {body: await reached(answer.json()), tag: answer.headers.get('ETag')};
}

/** What a request or the reading of its answer gives; an ApiError if nothing comes of it. */
export async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    const late = `no answer within ${ANSWER_TIMEOUT_MS / 1000} s`;
    throw new ApiError(0, error.name === 'TimeoutError' ? late : 'the address does not answer');
  }
}
