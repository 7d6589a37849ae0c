// The C ABI on a CUDA device: checks the arguments, then enqueues the stage on the caller's device and stream.
#include <exception>
#include <initializer_list>

#define SPLAT_MIN_THREADS 0
#include "../checks.h"
#include "enter.h"
#include "stages.h"

namespace {

namespace gpu = splat::gpu;

// Arrays that are written before anything is counted must have the capacity that the header asks for.
const char* lacking(const SplatGaussians* g, const SplatFrame* frame) {
  if (frame->counters == nullptr) return "counters are missing";
  if (frame->visible < splat::chunks_of(g->n) * splat::kChunk) return "visible is less than n rounded up to a chunk";
  return nullptr;
}

// Every entry passes here: no C++ exception reaches the caller.
template <class Work>
int32_t enter(const char* what, const SplatCall* call, Work work) {
  try {
    gpu::on_device(*call, work);
  } catch (const gpu::DeviceFault& error) {
    (void)fail(what, error.what());
    return SPLAT_DEVICE_FAULT;
  } catch (const gpu::LaunchRefused& error) {
    (void)fail(what, error.what());
    return SPLAT_LAUNCH_REFUSED;
  } catch (const std::exception& error) {
    return fail(what, error.what());
  }
  return 0;
}

}  // namespace

SPLAT_EXPORT int32_t splat_abi_version(void) { return SPLAT_ABI_VERSION; }
SPLAT_EXPORT const char* splat_last_error(void) { return last_error; }
SPLAT_EXPORT int32_t splat_best_isa(void) { return SPLAT_ISA_PORTABLE; }

SPLAT_EXPORT int32_t splat_project(const SplatCall* call, const SplatView* view, const SplatGaussians* gaussians,
                                   SplatFrame* frame, const SplatAdam* adam) {
  if (const char* f = first_fault(call, view, gaussians, frame)) return fail(__func__, f);
  for (const char* f : {adam == nullptr ? nullptr : fault(adam), misfit(view, gaussians), misfit(gaussians, adam),
                        lacking(gaussians, frame)})
    if (f != nullptr) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::project(*call, *view, *gaussians, *frame, lazy_adam(adam)); });
}

SPLAT_EXPORT int32_t splat_tile_row_isects(const SplatCall* call, const SplatView* view,
                                           const SplatGaussians* gaussians, const SplatFrame* frame,
                                           int64_t* tile_row_isects) {
  if (const char* f = first_fault(call, view, gaussians, frame)) return fail(__func__, f);
  if (const char* f = lacking(gaussians, frame)) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::tile_row_isects(*call, *view, *gaussians, *frame, tile_row_isects); });
}

SPLAT_EXPORT int64_t splat_bin_bytes(const SplatCall* call, const SplatView* view, const SplatFrame* frame) {
  if (const char* f = first_fault(call, view, frame)) return fail(__func__, f);
  if (frame->visible < 0 || frame->max_isects < 0) return fail(__func__, "a capacity is negative");
  return gpu::bin_bytes(*view, *frame);
}

SPLAT_EXPORT int32_t splat_bin(const SplatCall* call, const SplatView* view, const SplatGaussians* gaussians,
                               SplatFrame* frame) {
  if (const char* f = first_fault(call, view, gaussians, frame)) return fail(__func__, f);
  if (const char* f = lacking(gaussians, frame)) return fail(__func__, f);
  // Blocks of the sorts count what is left for them in 32 bits, below zero where the room is not used.
  if (frame->max_isects > INT32_MAX) return fail(__func__, "more than 2^31 - 1 tile intersections");
  const int64_t bytes = splat_bin_bytes(call, view, frame);
  if (bytes < 0) return -1;
  if (frame->workspace_bytes < bytes) return fail(__func__, "the workspace is too small");
  return enter(__func__, call, [&] { gpu::bin(*call, *view, *gaussians, *frame); });
}

SPLAT_EXPORT int32_t splat_blend(const SplatCall* call, const SplatView* view, const SplatFrame* frame,
                                 const void* background, const SplatImages* out) {
  if (const char* f = first_fault(call, view, frame, out)) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::blend(*call, *view, *frame, background, *out); });
}

SPLAT_EXPORT int32_t splat_blend_vjp(const SplatCall* call, const SplatView* view, const SplatFrame* frame,
                                     const void* background, const SplatImages* out, const SplatImages* v_out,
                                     void* background_partials, void* v_background) {
  if (const char* f = first_fault(call, view, frame, out, v_out)) return fail(__func__, f);
  return enter(__func__, call, [&] {
    gpu::blend_vjp(*call, *view, *frame, background, *out, *v_out, background_partials, v_background);
  });
}

SPLAT_EXPORT int32_t splat_sum_isect_grads(const SplatCall* call, const SplatGaussians* gaussians,
                                           const SplatFrame* frame, void* sums, uint32_t* reached) {
  if (const char* f = first_fault(call, gaussians, frame)) return fail(__func__, f);
  if (const char* f = lacking(gaussians, frame)) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::sum_isect_grads(*call, *gaussians, *frame, sums, reached); });
}

SPLAT_EXPORT int32_t splat_project_vjp(const SplatCall* call, const SplatView* view, const SplatGaussians* gaussians,
                                       const SplatFrame* frame, const SplatProjectGrad* grad) {
  if (const char* f = first_fault(call, view, gaussians, frame, grad)) return fail(__func__, f);
  for (const char* f : {misfit(view, gaussians), misfit(gaussians, grad->gradients), misfit(gaussians, grad->adam),
                        lacking(gaussians, frame)})
    if (f != nullptr) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::project_vjp(*call, *view, *gaussians, *frame, *grad); });
}

SPLAT_EXPORT int32_t splat_pose_vjp(const SplatCall* call, const SplatView* view, const SplatFrame* frame,
                                    const void* pose_partials, int64_t chunks, void* v_viewmat) {
  if (const char* f = first_fault(call, view, frame)) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::pose_vjp(*call, *view, *frame, pose_partials, chunks, v_viewmat); });
}

SPLAT_EXPORT int64_t splat_loss_bytes(const SplatCall* call, const SplatLoss* loss) {
  if (const char* f = first_fault(call, loss)) return fail(__func__, f);
  return gpu::loss_bytes(*loss);
}

SPLAT_EXPORT int32_t splat_loss(const SplatCall* call, SplatLoss* loss) {
  if (const char* f = first_fault(call, loss)) return fail(__func__, f);
  if (loss->means == nullptr) return fail(__func__, "means are missing");
  if (loss->mask != nullptr) return fail(__func__, "masks are for the CPU");
  return enter(__func__, call, [&] { gpu::loss(*call, *loss); });
}

SPLAT_EXPORT int32_t splat_adam(const SplatCall* call, const SplatGaussians* params, const SplatGaussians* gradients,
                                const SplatAdam* adam) {
  if (const char* f = first_fault(call, params, gradients, adam)) return fail(__func__, f);
  for (const char* f : {misfit(params, gradients), misfit(params, adam)})
    if (f != nullptr) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::adam(*call, *params, *gradients, *adam); });
}

SPLAT_EXPORT int32_t splat_noise(const SplatCall* call, const SplatGaussians* gaussians, const SplatNoise* noise) {
  if (const char* f = first_fault(call, gaussians, noise)) return fail(__func__, f);
  return enter(__func__, call, [&] { gpu::noise(*call, *gaussians, *noise); });
}
