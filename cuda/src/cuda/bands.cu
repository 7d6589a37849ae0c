// Enqueues what a view needs that is made band by band: kernels/bands.cuh. Rows and sums are read once, sums written once.
#include "../../kernels/bands.cuh"

#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {

void line_pairs(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians, const SplatFrame& frame,
                int64_t* out) {
  LinesJob job = {};
  job.width = view.width, job.height = view.height;
  job.tiles_x = tiles_across(view.width), job.tiles_y = tiles_across(view.height);
  job.records = static_cast<const float*>(frame.records);
  job.chunk_counts = frame.chunk_counts;
  job.counters = frame.counters;
  job.line_pairs = out;
  const cudaStream_t stream = stream_of(call);
  SPLAT_LAUNCH(line_differences, chunks_of(gaussians.n), SPLAT_CHUNK, stream, job);
  SPLAT_LAUNCH(scan_lines, 1, kLinesThreads, stream, job);
}

void sum_rows(const SplatCall& call, const SplatGaussians& gaussians, const SplatFrame& frame, void* sums,
              uint32_t* reached) {
  SumRowsJob job = {};
  job.chunk_counts = frame.chunk_counts;
  job.row_counts = frame.row_counts, job.row_starts = frame.row_starts;
  job.rows = static_cast<const float*>(frame.rows);
  job.counters = frame.counters;
  job.sums = static_cast<float*>(sums);
  job.reached = reached;
  SPLAT_LAUNCH(sum_band_rows, chunks_of(gaussians.n), kSumRowsThreads, stream_of(call), job);
}

}  // namespace gpu
}  // namespace splat
