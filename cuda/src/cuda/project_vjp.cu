// Enqueues the backward pass of projection, with Adam: kernels/project_vjp.cuh. With Adam every parameter and moment in
// use is read and written once, 24 bytes a number, and a visible Gaussian's raw parameters once more; intersection
// gradients are read once.
#include "../../kernels/project_vjp.cuh"

#include "arrays.h"
#include "launch.h"
#include "stages.h"

namespace splat {
namespace gpu {
namespace {

ProjectVjpJob job_of(const SplatView& view, const SplatGaussians& gaussians, const SplatFrame& frame,
                     const SplatProjectGrad& grad) {
  ProjectVjpJob job = {};
  job.view = camera_of(view);
  job.gaussians = raw_arrays(gaussians, view.filter_3d);
  job.antialiased = view.antialiased != 0;
  job.ids = frame.ids;
  job.chunk_counts = frame.chunk_counts;
  job.tiles_per_gauss = frame.tiles_per_gauss;
  job.isect_grad_starts = frame.isect_grad_starts;
  job.isect_grads = static_cast<const float*>(frame.isect_grads);
  job.counters = frame.counters;
  job.with_adam = grad.adam != nullptr;
  if (grad.adam != nullptr) job.means_rate = means_rate_of<float>(*grad.adam);
  if (grad.adam != nullptr && grad.adam->sh_last_step != nullptr) {
    job.sh_last_step = grad.adam->sh_last_step;
    job.step = int32_t(grad.adam->step);
  }
  for (int group = 0; group < kGroups; ++group) {
    if (grad.adam != nullptr) job.adam[group] = adam_group(gaussians, *grad.adam, group);
    if (grad.gradients != nullptr) job.gradients[group] = static_cast<float*>(group_of(*grad.gradients, group));
  }
  job.pose_partials = static_cast<float*>(grad.pose_partials);
  job.grad2d = static_cast<float*>(grad.grad2d);
  job.count = static_cast<float*>(grad.count);
  job.with_abs = frame.with_abs != 0;
  return job;
}

template <bool POSE, bool PINHOLE>
void launch_chunks(cudaStream_t stream, int degree, int64_t chunks, const ProjectVjpJob& job) {
  switch (degree) {
    case 0: SPLAT_LAUNCH((project_vjp_chunks<0, POSE, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    case 1: SPLAT_LAUNCH((project_vjp_chunks<1, POSE, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    case 2: SPLAT_LAUNCH((project_vjp_chunks<2, POSE, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    case 3: SPLAT_LAUNCH((project_vjp_chunks<3, POSE, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
    default: SPLAT_LAUNCH((project_vjp_chunks<4, POSE, PINHOLE>), chunks, SPLAT_CHUNK, stream, job); break;
  }
}

}  // namespace

void project_vjp(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians,
                 const SplatFrame& frame, const SplatProjectGrad& grad) {
  const cudaStream_t stream = stream_of(call);
  const int64_t chunks = chunks_of(gaussians.n);
  const ProjectVjpJob job = job_of(view, gaussians, frame, grad);
  const bool pinhole = job.view.model == kPinhole;
  const auto with_pose = pinhole ? launch_chunks<true, true> : launch_chunks<true, false>;
  const auto without = pinhole ? launch_chunks<false, true> : launch_chunks<false, false>;
  (grad.pose_partials != nullptr ? with_pose : without)(stream, view.sh_degree, chunks, job);
}

void pose_vjp(const SplatCall& call, const SplatView& view, const SplatFrame& frame, const void* pose_partials,
              int64_t chunks, void* v_viewmat) {
  PoseJob job = {};
  job.partials = static_cast<const float*>(pose_partials);
  job.chunks = chunks;
  for (int k = 0; k < 16; ++k) job.viewmat[k] = float(view.viewmat[k]);
  job.v_viewmat = static_cast<float*>(v_viewmat);
  job.counters = frame.counters;
  SPLAT_LAUNCH(reduce_pose, 1, kPoseThreads, stream_of(call), job);
}

}  // namespace gpu
}  // namespace splat
