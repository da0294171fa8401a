// Blocks of cells, rows without sinks, and the scales: the same arithmetic as mhacli/render/headmaps.py.

// Where less than this is left of a row, it is not blown up: it would be rounding.
const NOTHING = 1e-6;

// Blocks of factor × factor cells: means over the queries that see a key, of sums over keys.
function pooled(map, factor) {
  if (factor === 1) return map;
  const rows = Math.ceil(map.rows / factor), columns = Math.ceil(map.columns / factor);
  const cells = new Float64Array(rows * columns), open = new Uint8Array(rows * columns), seen = new Float64Array(rows);
  for (let row = 0; row < map.rows; row++) {
    const weight = map.seen[row], from = row * map.columns, to = Math.floor(row / factor) * columns;
    seen[Math.floor(row / factor)] += weight;
    for (let column = 0; column < map.columns; column++) {
      const share = map.cells[from + column], cell = to + Math.floor(column / factor);
      if (share === FORBIDDEN) continue;
      cells[cell] += share * weight;
      open[cell] = 1;
    }
  }
  for (let cell = 0; cell < cells.length; cell++) {
    cells[cell] = open[cell] ? cells[cell] / Math.max(1, seen[Math.floor(cell / columns)]) : FORBIDDEN;
  }
  return {
    ...map, rows, columns, cells, seen, block: map.block * factor, isExact: false,
    learned: map.learned && pooledRows(map, map.learned, 1, [0], factor).numbers,
    ...pooledSinks(map, factor),
  };
}

function pooledSinks(map, factor) {
  const columns = map.sinkColumns.map((column) => Math.floor(column / factor));
  const { numbers, kept } = pooledRows(map, map.ofSinks, columns.length, columns, factor);
  return { ofSinks: numbers, sinkColumns: kept };
}

// Means over rows of some columns; those that fall into one block are summed.
function pooledRows(map, numbers, width, columns, factor) {
  const kept = [...new Set(columns)];
  const rows = Math.ceil(map.rows / factor), sums = new Float64Array(rows * kept.length), seen = new Float64Array(rows);
  for (let row = 0; row < map.rows; row++) {
    const block = Math.floor(row / factor);
    seen[block] += map.seen[row];
    for (let i = 0; i < width; i++) {
      sums[block * kept.length + kept.indexOf(columns[i])] += numbers[row * width + i] * map.seen[row];
    }
  }
  for (let i = 0; i < sums.length; i++) sums[i] /= Math.max(1, seen[Math.floor(i / kept.length)]);
  return { numbers: sums, kept };
}

// What sinks get of each row.
function sinkShares(map) {
  const width = map.sinkColumns.length, shares = new Float64Array(map.rows);
  for (let i = 0; i < map.ofSinks.length; i++) shares[Math.floor(i / width)] += map.ofSinks[i];
  return shares;
}

// The rest of each row beside sinks, learned ones too, renormalised by its own sum; what sinks got stands in `taken`.
function withoutSinks(map) {
  const taken = sinkShares(map), cells = Float64Array.from(map.cells), width = map.sinkColumns.length;
  for (let row = 0; row < map.rows; row++) {
    const from = row * map.columns;
    map.sinkColumns.forEach((column, i) => {
      if (cells[from + column] !== FORBIDDEN) cells[from + column] -= map.ofSinks[row * width + i];
    });
    let left = 0;
    for (let i = from; i < from + map.columns; i++) {
      if (map.cells[i] !== FORBIDDEN) left += Math.max(0, cells[i]);
    }
    for (let i = from; i < from + map.columns; i++) {
      if (map.cells[i] === FORBIDDEN) continue;
      cells[i] = left > NOTHING ? Math.max(0, cells[i]) / left : Number.isNaN(left) ? NaN : 0;
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
function leveller(map, kind, top) {
  if (kind === "rank") return rankLeveller(map);
  const decades = RECORD.scale.decades, least = top * 10 ** -decades;
  const of = kind === "log" ? (share) => 1 + Math.log10(Math.max(share, least) / top) / decades : (share) => share / top;
  return (share) => Math.round(255 * Math.min(1, Math.max(0, of(share))));
}

const ordered = new WeakMap();

// By the share of open cells that are smaller.
function rankLeveller(map) {
  if (!ordered.has(map.cells)) ordered.set(map.cells, map.cells.filter((share) => share >= 0).sort());
  const order = ordered.get(map.cells);
  return (share) => Math.round((255 * countSmaller(order, share)) / Math.max(1, order.length - 1));
}

function countSmaller(order, share) {
  let low = 0, high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (order[middle] < share) low = middle + 1;
    else high = middle;
  }
  return low;
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
