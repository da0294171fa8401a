// Blocks of cells, rows without sinks, and the scales: the same arithmetic as mhacli/render/heads/head_map.py. Levels are computed
// here because the window decides how large blocks are, and the reader which scale they have and whether sinks are among them.

// Where less than this is left of a row, it is not blown up: it would be rounding.
const NOTHING = 1e-6;

// Blocks of factor × factor cells: means over the queries that see a key, of sums over keys.
function pooled(map, factor) {
  if (factor === 1) return map;
  const seen = new Float64Array(Math.ceil(map.rows / factor));
  map.seen.forEach((weight, row) => (seen[Math.floor(row / factor)] += weight));
  const means = (numbers, perRow) => meansOf(numbers, map.seen, seen, { perRow, down: factor, across: Math.min(perRow, factor) });
  return {
    ...map, rows: seen.length, columns: Math.ceil(map.columns / factor), seen, block: map.block * factor, isExact: false,
    cells: means(map.cells, map.columns), ofSinks: means(map.ofSinks, map.columns), learned: map.learned && means(map.learned, 1),
  };
}

function meansOf(numbers, weights, seen, { perRow, down, across }) {
  const columns = Math.ceil(perRow / across), means = new Float64Array(seen.length * columns).fill(FORBIDDEN);
  for (let row = 0; row < weights.length; row++) {
    for (let column = 0; column < perRow; column++) {
      const number = numbers[row * perRow + column], cell = Math.floor(row / down) * columns + Math.floor(column / across);
      if (number !== FORBIDDEN) means[cell] = Math.max(0, means[cell]) + number * weights[row];
    }
  }
  return means.map((sum, cell) => (sum === FORBIDDEN ? sum : sum / Math.max(1, seen[Math.floor(cell / columns)])));
}

// The rest of each row beside sinks and the sink logit, renormalised by its own sum; what sinks got stands in `taken`.
function withoutSinks(map) {
  const taken = new Float64Array(map.rows), cells = Float64Array.from(map.cells);
  for (let row = 0; row < map.rows; row++) {
    const from = row * map.columns, to = from + map.columns;
    let left = 0;
    for (let i = from; i < to; i++) {
      taken[row] += map.ofSinks[i];
      if (cells[i] === FORBIDDEN) continue;
      cells[i] = Math.max(0, cells[i] - map.ofSinks[i]);
      left += cells[i];
    }
    for (let i = from; i < to; i++) {
      if (cells[i] !== FORBIDDEN) cells[i] = left > NOTHING ? cells[i] / left : Number.isNaN(left) ? NaN : 0;
    }
  }
  return { ...map, cells, taken, isExact: false };
}

// The largest share of a row that had a choice of columns.
function largestOf(map) {
  let largest = 0;
  for (let row = 0; row < map.rows; row++) {
    let choices = 0, most = 0;
    for (let i = row * map.columns; i < (row + 1) * map.columns; i++) {
      if (map.cells[i] === FORBIDDEN) continue;
      choices++;
      if (map.cells[i] > most) most = map.cells[i];
    }
    if (choices > 1 && most > largest) largest = most;
  }
  return largest;
}

// A function from a share to a level of 0 … 255.
function leveller(kind, top) {
  const decades = RECORD.scale.decades, least = top * 10 ** -decades;
  const of = kind === "log" ? (share) => 1 + Math.log10(Math.max(share, least) / top) / decades : (share) => share / top;
  return (share) => Math.round(255 * Math.min(1, Math.max(0, of(share))));
}

// Dark to bright in an order that survives colour blindness and grey.
// Source: the colours of "viridis" (van der Walt and Smith 2015, CC0), at eight points.
const RAMP = [
  [68, 1, 84], [70, 50, 127], [54, 92, 141], [39, 127, 142], [31, 161, 135], [74, 194, 109], [159, 218, 58], [253, 231, 37],
];
// Other colours than any of the ramp.
const SINK = [255, 64, 200], NO_NUMBER = [240, 90, 20];

const COLOURS = Array.from({ length: 256 }, (_, level) => {
  const place = (level / 255) * (RAMP.length - 1), low = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[low].map((part, i) => Math.round(part + (RAMP[low + 1][i] - part) * (place - low)));
});

const sinkColour = (share) => SINK.map((part) => Math.round(part * Math.min(1, Math.max(0, share))));
const css = (colour) => `rgb(${colour.join(" ")})`;
// Black or white letters on a colour, by its luminance.
const inkOn = ([red, green, blue]) => (0.2126 * red + 0.7152 * green + 0.0722 * blue > 110 ? "#000" : "#fff");

// Some rows and columns of a map as an image, one pixel a cell; forbidden cells stay clear.
function imageOf(map, level, { row, column, rows, columns }) {
  const image = new ImageData(columns, rows);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      const share = map.cells[(row + y) * map.columns + column + x], at = 4 * (y * columns + x);
      if (share === FORBIDDEN) continue;
      const colour = Number.isNaN(share) ? NO_NUMBER : COLOURS[level(share)];
      image.data[at] = colour[0];
      image.data[at + 1] = colour[1];
      image.data[at + 2] = colour[2];
      image.data[at + 3] = 255;
    }
  }
  return image;
}
