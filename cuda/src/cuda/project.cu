// Enqueues projection: kernels/project.cuh. Reads 56 bytes of a Gaussian in front of the camera (12 of one behind it),
// its SH coefficients where it is visible, and writes 56 bytes then. Where its SH rest missed steps, another 20 bytes a
// coefficient and channel are moved.
#include "../../kernels/project.cuh"

#include "arrays.h"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {

void project(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians, SplatFrame& frame,
             const SplatAdam* rest) {
  ProjectJob job;
  job.view = pinhole_of(view);
  job.gaussians = raw_arrays(gaussians, view.smoothing);
  job.antialiased = view.antialiased != 0;
  job.tiles_x = tiles_across(view.width), job.tiles_y = tiles_across(view.height);
  job.records = static_cast<float*>(frame.records);
  job.ids = frame.ids;
  job.chunk_counts = frame.chunk_counts;
  job.row_counts = frame.row_counts;
  job.counters = frame.counters;
  job.rest = lazy_rest(gaussians, rest);
  const cudaStream_t stream = stream_of(call);
  const int64_t chunks = chunks_of(gaussians.n);
  switch (view.sh_degree) {
    case 0: SPLAT_LAUNCH((project_chunks<0>), chunks, SPLAT_CHUNK, stream, job); break;
    case 1: SPLAT_LAUNCH((project_chunks<1>), chunks, SPLAT_CHUNK, stream, job); break;
    case 2: SPLAT_LAUNCH((project_chunks<2>), chunks, SPLAT_CHUNK, stream, job); break;
    case 3: SPLAT_LAUNCH((project_chunks<3>), chunks, SPLAT_CHUNK, stream, job); break;
    default: SPLAT_LAUNCH((project_chunks<4>), chunks, SPLAT_CHUNK, stream, job); break;
  }
  SPLAT_LAUNCH(project_totals, 1, kTotalsThreads, stream, frame.chunk_counts, chunks, frame.counters);
}

}  // namespace gpu
}  // namespace splat
