// Draws the curves of the page with uPlot, in the colours of the scheme that is on.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const AXIS_WIDTH = 66; // the same for all, so that their samples line up
  const LEGEND_HEIGHT = 22; // of a chart with one line, whose legend takes the place of its ends
  const COLOURS = 8;
  let charts = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const font = (size) => `${size}px ${getComputedStyle(document.body).fontFamily}`;
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const short = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });

  function number(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size > 0 && size < 1e-3) return value.toExponential(2);
    return size >= 1000 ? whole.format(value) : short.format(value);
  }

  // Labels of an axis, all with as many decimals as the distance between them needs.
  function labels(_, splits, __, ___, step) {
    if (step < 1e-3) return splits.map((value) => (value ? Number(value.toPrecision(6)).toExponential() : "0"));
    let decimals = 0;
    while (decimals < 4 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
    const format = new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
    return splits.map((value) => (value == null ? null : format.format(value)));
  }

  const axis = (more) => ({
    stroke: colour("soft"), font: font(11), labelFont: font(12), gap: 4, values: labels,
    grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 5 }, ...more,
  });

  const fromZero = (_, least, most) => [0, most > 0 ? most * 1.08 : 1];
  const around = (_, least, most) => {
    if (least == null) return [0, 1];
    const room = 0.06 * (most - least) || 0.1 * Math.abs(most) || 1;
    return [least - room, most + room];
  };

  function draw(target, height, options, columns) {
    const idle = (chart) => chart.root.classList.toggle("idle", chart.cursor.idx == null);
    const hooks = { ...options.hooks, ready: [idle], setCursor: [idle] };
    const legend = { markers: { width: 0, fill: (chart, index) => chart.series[index].stroke(chart, index) } };
    charts.push(new uPlot({ width: target.clientWidth, height, ...options, hooks, legend }, columns, target));
  }

  const at = (chart, value, scale) => Math.round(chart.valToPos(value, scale, true)) + 0.5;
  const isWithin = (chart, x) => x >= chart.bbox.left && x <= chart.bbox.left + chart.bbox.width;

  function upright(chart, value, name, dash) {
    const { ctx, bbox } = chart;
    const x = at(chart, value, "x");
    if (!isWithin(chart, x)) return;
    ctx.save();
    ctx.strokeStyle = colour(name);
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  function triangle(chart, value, name) {
    const { ctx, bbox } = chart;
    const x = at(chart, value, "x");
    if (!isWithin(chart, x)) return;
    const half = 5 * devicePixelRatio;
    ctx.save();
    ctx.fillStyle = colour(name);
    ctx.beginPath();
    ctx.moveTo(x - half, bbox.top);
    ctx.lineTo(x + half, bbox.top);
    ctx.lineTo(x, bbox.top + 1.6 * half);
    ctx.fill();
    ctx.restore();
  }

  function note(chart, value, words, above = 0) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.font = font(11 * devicePixelRatio);
    ctx.fillStyle = colour("ink");
    ctx.textBaseline = "bottom";
    const width = ctx.measureText(words).width + 6 * devicePixelRatio;
    const x = at(chart, value, "x");
    const isLeft = x + width > bbox.left + bbox.width;
    ctx.textAlign = isLeft ? "right" : "left";
    ctx.fillText(words, x + (isLeft ? -5 : 5) * devicePixelRatio, bbox.top + bbox.height - (5 + above) * devicePixelRatio);
    ctx.restore();
  }

  // Training

  const isValidation = (line) => line.column.startsWith("validation"); // of a set of data, of several perhaps

  function lineOf(line, run, name, isMain, isLine) {
    const style = { label: name, spanGaps: true, value: (_, value) => number(value), points: { show: false } };
    style.stroke = colour(data.runs.length > 1 ? `c${run % COLOURS}` : isMain ? "c0" : "c1");
    style.width = data.runs.length > 1 && !run ? 5 : 2;
    if (data.runs.length > 1 && run) style.dash = [8, 4 + 4 * run]; // what lies below shows through
    if (line.column === "batch") style.paths = uPlot.paths.stepped({ align: -1 });
    if (line.column === "loss") {
      if (data.runs.length === 1) style.width = 1;
      if (line.isFaint) style.stroke = colour("faint");
    }
    if (isValidation(line)) style.stroke = colour(`c${(1 + line.nth) % COLOURS}`);
    if (isValidation(line) || !isLine) {
      style.points = { show: true, size: 7, width: 1, stroke: style.stroke, fill: style.stroke };
    }
    return style;
  }

  function drawTraining(target) {
    const name = target.dataset.chart;
    const { lines, title, unit } = data.charts[name];
    const tables = [];
    const series = [{ label: "samples seen", value: (_, value) => number(value) }];
    data.runs.forEach((run, index) => {
      let there = lines.filter((line) => run.columns[line.column]);
      if (!run.columns[lines[0].column]) {
        tables.push([run.columns.seen || []]); // its samples alone, so that all charts have the same axis
        return;
      }
      if (data.runs.length > 1) there = [there.find((line) => line.column === "trend") || there[0]];
      tables.push([run.columns.seen, ...there.map((line) => run.columns[line.column])]);
      there.forEach((line, place) => {
        const isFaint = line.column === "loss" && there.length > 1;
        const isMain = name === "loss" ? true : place === 0;
        const isLine = run.columns[line.column].filter((value) => value != null).length > 1;
        const nth = there.slice(0, place).filter(isValidation).length;
        series.push(lineOf({ ...line, isFaint, nth }, index, data.runs.length > 1 ? run.name : line.label, isMain, isLine));
      });
    });
    const limits = [...new Set(data.runs.map((run) => (name === "memory" && run.columns.memory ? run.limit : null)))];
    if (limits.length === 1 && limits[0] != null) { // of all the same
      tables.push([tables[0][0], tables[0][0].map(() => limits[0])]);
      const points = { show: tables[0][0].length < 2, size: 7 };
      series.push({ label: "limit", stroke: colour("bad"), width: 1.5, dash: [6, 4], points, value: (_, value) => number(value) });
    }
    const marks = (chart) => {
      if (data.runs.length === 1) data.runs[0].epochs.forEach((seen) => upright(chart, seen, "soft", [3, 3]));
      data.runs.forEach((run, index) => {
        const name = data.runs.length > 1 ? `c${index % COLOURS}` : "bad";
        run.recoveries.forEach((seen) => triangle(chart, seen, name));
      });
    };
    draw(target, (name === "loss" ? 280 : 210) + (series.length > 2 ? 0 : LEGEND_HEIGHT), {
      series,
      scales: { x: { time: false }, y: { range: name === "loss" || name === "padding" ? around : fromZero } },
      axes: [
        axis({ size: 32, label: "samples seen", labelSize: 18 }),
        axis({ size: AXIS_WIDTH, label: unit.includes(" ") || !unit ? title.toLowerCase() : unit, labelSize: 18 }),
      ],
      cursor: { sync: { key: "training" }, drag: { x: true, y: false }, points: { size: 7 } },
      padding: [8, 14, 0, 0],
      hooks: { drawAxes: [marks] },
    }, tables.length > 1 ? uPlot.join(tables) : tables[0]);
  }

  // Probe

  function drawProbe(target) {
    const probe = data.probes[Number(target.dataset.probe)];
    const points = [...probe.predicted, ...probe.measured, ...probe.failed.map((size) => [size, null])];
    const sizes = [...new Set([...points.map(([size]) => size), probe.chosen, probe.exact ?? probe.chosen])].sort((a, b) => a - b);
    const column = (pairs) => {
      const known = new Map(pairs);
      return sizes.map((size) => known.get(size) ?? null);
    };
    const value = (_, bytes) => (bytes == null ? "" : `${number(bytes)} ${probe.unit}`);
    const dots = (label, name, isFilled) => ({
      label, value, stroke: colour(name), width: 2, paths: () => null,
      points: { show: true, size: 9, width: 2, stroke: colour(name), fill: isFilled ? colour(name) : colour("card") },
    });
    const columns = [sizes];
    const series = [{ label: "batch size", value: (_, size) => number(size) }];
    const add = (pairs, style) => {
      if (!pairs.length) return;
      columns.push(column(pairs));
      series.push({ spanGaps: true, value, ...style });
    };
    add(probe.predicted, { label: "line", stroke: colour("c0"), width: 2, points: { show: false } });
    add(sizes.map((size) => [size, probe.budget]), {
      label: "limit", stroke: colour("bad"), width: 1.5, dash: [6, 4], points: { show: false },
    });
    add(probe.measured, dots("measured", "ink", true));
    add(probe.failed.map((size) => [size, probe.budget]), dots("out of memory", "bad", false));
    const chosen = (chart) => {
      upright(chart, probe.chosen, "soft", [3, 3]);
      note(chart, probe.chosen, `chosen: ${number(probe.chosen)}`);
      if (probe.exact == null) return;
      upright(chart, probe.exact, "soft", [1, 3]);
      note(chart, probe.exact, `${number(probe.exact)} fit, rounded down to ${number(probe.chosen)}`, 18);
    };
    draw(target, 260, {
      series,
      scales: { x: { time: false, range: (_, __, most) => [0, most * 1.04] }, y: { range: fromZero } },
      axes: [
        axis({ size: 32, label: "batch size", labelSize: 18, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5] }),
        axis({ size: AXIS_WIDTH, label: probe.unit, labelSize: 18 }),
      ],
      cursor: { drag: { x: false, y: false }, points: { size: 7 } },
      padding: [8, 14, 0, 0],
      hooks: { draw: [chosen] },
    }, columns);
  }

  function drawAll() {
    charts.forEach((chart) => chart.destroy());
    charts = [];
    document.querySelectorAll("[data-chart]").forEach(drawTraining);
    document.querySelectorAll("[data-probe]").forEach(drawProbe);
    document.documentElement.dataset.drawn = String(charts.length);
  }

  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);
  new ResizeObserver(() => {
    for (const chart of charts) {
      const width = chart.root.parentElement.clientWidth;
      if (width !== chart.width) chart.setSize({ width, height: chart.height });
    }
  }).observe(document.querySelector("main"));
})();
