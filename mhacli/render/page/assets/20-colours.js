// The colours of weights, on one scale for all heads.

const scaleTop = () => (choice.hideSinks ? RECORD.scale.largest_without_sinks : RECORD.scale.largest);

// A function from a share to a level of 0 … 255.
function leveller() {
  const { decades } = RECORD.scale, top = scaleTop(), least = top * 10 ** -decades;
  const log = (share) => 1 + Math.log10(Math.max(share, least) / top) / decades;
  const of = choice.scale === "log" ? log : (share) => share / top;
  return (share) => Math.round(255 * Math.min(1, Math.max(0, of(share))));
}

// Dark to bright in an order that survives colour blindness and grey.
// Source: the colours of "viridis" (van der Walt and Smith 2015, CC0), at eight points.
const RAMP = [
  [68, 1, 84], [70, 50, 127], [54, 92, 141], [39, 127, 142], [31, 161, 135], [74, 194, 109], [159, 218, 58], [253, 231, 37],
];
// Other colours than any of the ramp.
const SINK = [255, 64, 200], NO_NUMBER = [214, 39, 40];

const COLOURS = Array.from({ length: 256 }, (_, level) => {
  const place = (level / 255) * (RAMP.length - 1), low = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[low].map((part, i) => Math.round(part + (RAMP[low + 1][i] - part) * (place - low)));
});

const sinkColour = (share) => SINK.map((part) => Math.round(part * Math.min(1, Math.max(0, share))));
const css = (colour) => `rgb(${colour.join(" ")})`;
// Black or white letters on a colour, by its luminance.
const inkOn = ([red, green, blue]) => (0.2126 * red + 0.7152 * green + 0.0722 * blue > 110 ? "#000" : "#fff");

// A map as a canvas, one pixel a cell; forbidden cells stay clear.
function imageOf({ rows, columns }, cells) {
  const image = new ImageData(columns, rows), level = leveller();
  cells.forEach((share, i) => {
    if (share === FORBIDDEN) return;
    const colour = Number.isNaN(share) ? NO_NUMBER : COLOURS[level(share)];
    image.data.set([...colour, 255], 4 * i);
  });
  const canvas = make("canvas", { width: columns, height: rows });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
