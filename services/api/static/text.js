/**
 * The text of a turn cut into what it means. Only what the policy wrote is read for actions; an
 * observation is passages, whatever stands in it.
 */

const PIECE = /<(think|search|answer)>([\s\S]*?)(?:<\/\1>|(?=<(?:search|answer|think)>)|$)/g;
const KIND = {think: 'thought', search: 'search', answer: 'answer'};

/**
 * "<think>so</think><search>a</search>" ->
 * [{kind: 'thought', text: 'so'}, {kind: 'search', text: 'a'}]. What stands outside of a tag is
 * `plain`; a thought that the prompt has opened ends with a lone `</think>`.
 */
export function piecesOf(generated) {
  const lone = /^((?:(?!<think>)[\s\S])*?)<\/think>/.exec(generated);
  const pieces = [];
  let place = 0;
  const add = (kind, text) => {
    if (text.trim()) pieces.push({kind, text: text.trim()});
  };
  if (lone) {
    add('thought', lone[1]);
    place = lone[0].length;
  }
  PIECE.lastIndex = place;
  for (const match of generated.matchAll(PIECE)) {
    if (match.index < place) continue;
    add('plain', generated.slice(place, match.index));
    add(KIND[match[1]], match[2]);
    place = match.index + match[0].length;
  }
  add('plain', generated.slice(place));
  return pieces;
}

const DOCUMENT = /(?:^|\n)Doc \d+: /;

/**
 * An observation as its passages: [{title, text}]. One that holds none, such as a correction or
 * what another environment says, is one entry without a title.
 */
export function passagesOf(observed) {
  const inside = observed.replace(/^\s*<information>\s*|\s*<\/information>\s*$/g, '');
  const parts = inside.split(DOCUMENT);
  if (parts.length < 2) return inside.trim() ? [{title: null, text: inside.trim()}] : [];
  return parts.slice(1).map(part => {
    const match = /^"([^"\n]*)" ?([\s\S]*)$/.exec(part);
    return match ? {title: match[1], text: match[2].trim()} : {title: null, text: part.trim()};
  });
}
