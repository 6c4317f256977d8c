/** Numbers as people read them. What is not known is a dash. */

export const DASH = '–';

const isKnown = value => typeof value === 'number' && Number.isFinite(value);

/** 0.74479 with 3 digits -> "0.745"; 1234.5 with 0 -> "1,235". */
export function fixed(value, digits = 3) {
  if (!isKnown(value)) return DASH;
  return value.toLocaleString('en-GB', {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
}

/** Three digits that count: 0.00123456 -> "0.00123", 0 -> "0". */
export function significant(value) {
  if (!isKnown(value)) return DASH;
  if (value === 0) return '0';
  return Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6
    ? value.toExponential(1)
    : Number(value.toPrecision(3)).toLocaleString('en-GB', {maximumSignificantDigits: 3});
}

/** 1234567 -> "1,234,567". */
export const whole = value => fixed(value, 0);

/** 0.7111 -> "71 %"; below ten percent with one digit: 0.0213 -> "2.1 %", 0.0001 -> "0 %". */
export function percent(share) {
  if (!isKnown(share)) return DASH;
  const value = share * 100;
  return `${fixed(value, value >= 0.05 && value < 9.95 ? 1 : 0)} %`;
}

/** 12 -> "12 s"; 65 -> "1 m 05 s"; 3700 -> "1 h 01 m". */
export function duration(seconds) {
  if (!isKnown(seconds)) return DASH;
  const all = Math.max(0, Math.round(seconds));
  const pad = number => String(number).padStart(2, '0');
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} m ${pad(all % 60)} s`;
  return `${Math.floor(all / 3600)} h ${pad(Math.floor((all % 3600) / 60))} m`;
}

/** 291.017 -> "291 ms"; 4.2 -> "4.2 ms"; 12345 -> "12.3 s". */
export function milliseconds(value) {
  if (!isKnown(value)) return DASH;
  if (value >= 1e4) return `${fixed(value / 1e3, 1)} s`;
  return `${fixed(value, value < 9.95 ? 1 : 0)} ms`;
}

/** 1536 -> "1.5 KiB". */
export function bytes(value) {
  if (!isKnown(value)) return DASH;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const place = value < 1 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${fixed(value / 1024 ** place, place ? 1 : 0)} ${units[place]}`;
}

/** Unix seconds as the clock of who looks: "12:04:09". */
export function clock(unixSeconds) {
  if (!isKnown(unixSeconds)) return DASH;
  return new Date(unixSeconds * 1000).toLocaleTimeString('en-GB');
}

/** plural(1, 'group') -> "1 group"; plural(3, 'group') -> "3 groups". */
export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? '' : 's'}`;
