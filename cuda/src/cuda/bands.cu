// Enqueues the extra kernels of a view that is made band by band: kernels/bands.cuh. Intersection gradients and sums
// are read once, sums written once.
#include "../../kernels/bands.cuh"

#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {

void tile_row_isects(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians,
                     const SplatFrame& frame, int64_t* out) {
  TileRowsJob job = {};
  job.width = view.width, job.height = view.height;
  job.tiles_x = tiles_across(view.width), job.tiles_y = tiles_across(view.height);
  job.projected = static_cast<const float*>(frame.projected);
  job.chunk_counts = frame.chunk_counts;
  job.counters = frame.counters;
  job.tile_row_isects = out;
  const cudaStream_t stream = stream_of(call);
  SPLAT_LAUNCH(tile_row_differences, chunks_of(gaussians.n), SPLAT_CHUNK, stream, job);
  SPLAT_LAUNCH(scan_tile_rows, 1, kTileRowsThreads, stream, job);
}

void sum_isect_grads(const SplatCall& call, const SplatGaussians& gaussians, const SplatFrame& frame, void* sums,
                     uint32_t* reached) {
  SumIsectGradsJob job = {};
  job.chunk_counts = frame.chunk_counts;
  job.tiles_per_gauss = frame.tiles_per_gauss, job.isect_grad_starts = frame.isect_grad_starts;
  job.isect_grads = static_cast<const float*>(frame.isect_grads);
  job.counters = frame.counters;
  job.sums = static_cast<float*>(sums);
  job.reached = reached;
  SPLAT_LAUNCH(sum_band_isect_grads, chunks_of(gaussians.n), kSumIsectGradsThreads, stream_of(call), job);
}

}  // namespace gpu
}  // namespace splat
