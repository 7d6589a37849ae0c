// Enqueues projection: kernels/project.cuh. Reads 56 bytes of a Gaussian in front of the camera (12 of one behind it),
// its SH coefficients where it is visible, and writes 56 bytes then. Where its shN missed steps, another 20 bytes a
// coefficient and channel are moved.
#include "../../kernels/project.cuh"

#include "arrays.h"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {
namespace {

template <bool PINHOLE>
void launch_chunks(cudaStream_t stream, int degree, int64_t chunks, const ProjectJob& job) {
  switch (degree) {
    case 0: SPLAT_LAUNCH((project_chunks<0, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    case 1: SPLAT_LAUNCH((project_chunks<1, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    case 2: SPLAT_LAUNCH((project_chunks<2, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    case 3: SPLAT_LAUNCH((project_chunks<3, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    default: SPLAT_LAUNCH((project_chunks<4, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
  }
}

}  // namespace

void project(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians, SplatFrame& frame,
             const SplatAdam* lazy) {
  ProjectJob job;
  job.view = camera_of(view);
  job.gaussians = raw_arrays(gaussians, view.filter_3d);
  job.antialiased = view.antialiased != 0;
  job.tiles_x = tiles_across(view.width), job.tiles_y = tiles_across(view.height);
  job.projected = static_cast<float*>(frame.projected);
  job.ids = frame.ids;
  job.chunk_counts = frame.chunk_counts;
  job.tiles_per_gauss = frame.tiles_per_gauss;
  job.counters = frame.counters;
  job.lazy = lazy_shN(gaussians, lazy);
  const cudaStream_t stream = stream_of(call);
  const int64_t chunks = chunks_of(gaussians.n);
  const auto launch = job.view.model == kPinhole ? launch_chunks<true> : launch_chunks<false>;
  launch(stream, view.sh_degree, chunks, job);
  SPLAT_LAUNCH(project_totals, 1, kTotalsThreads, stream, frame.chunk_counts, chunks, frame.counters);
}

}  // namespace gpu
}  // namespace splat
