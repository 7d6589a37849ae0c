// The C ABI on the CPU: checks the arguments, then calls the stage for the number type.
#include <exception>
#include <initializer_list>

#include "../checks.h"
#include "stages.h"

// Runs `statement` with Stages set to the class for the call's dtype.
#ifdef SPLAT_WITH_DOUBLE
#define SPLAT_DISPATCH(call, statement)          \
  if ((call)->dtype == SPLAT_FLOAT64) {          \
    using Stages = splat::Stages<double>;        \
    statement;                                   \
  } else {                                       \
    using Stages = splat::Stages<float>;         \
    statement;                                   \
  }
#else
#define SPLAT_DISPATCH(call, statement)   \
  {                                       \
    using Stages = splat::Stages<float>;  \
    statement;                            \
  }
#endif

// Every entry passes here: arguments are checked first, and no C++ exception (a lack of memory, say) reaches the
// caller.
#define SPLAT_ENTER(call, statement, ...)                                       \
  if (const char* f = first_fault(__VA_ARGS__)) return fail(__func__, f);       \
  try {                                                                         \
    SPLAT_DISPATCH(call, statement)                                             \
  } catch (const std::exception& error) {                                       \
    return fail(__func__, error.what());                                        \
  }                                                                             \
  return 0;

SPLAT_EXPORT int32_t splat_abi_version(void) { return SPLAT_ABI_VERSION; }
SPLAT_EXPORT const char* splat_last_error(void) { return last_error; }

SPLAT_EXPORT int32_t splat_best_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
    return SPLAT_ISA_AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return SPLAT_ISA_AVX2;
#elif defined(__aarch64__)
  return SPLAT_ISA_NEON;  // every 64-bit ARM processor has it
#endif
  return SPLAT_ISA_PORTABLE;
}

SPLAT_EXPORT int32_t splat_project(const SplatCall* call, const SplatView* view, const SplatGaussians* gaussians,
                                   SplatFrame* frame, const SplatAdam* adam) {
  if (const char* f = first_fault(call, view, gaussians, frame)) return fail(__func__, f);
  for (const char* f : {adam == nullptr ? nullptr : fault(adam), misfit(view, gaussians), misfit(gaussians, adam)})
    if (f != nullptr) return fail(__func__, f);
  SPLAT_ENTER(call, Stages::project(*call, *view, *gaussians, *frame, lazy_adam(adam)), call)
}

SPLAT_EXPORT int32_t splat_tile_row_isects(const SplatCall* call, const SplatView* view,
                                           const SplatGaussians* gaussians, const SplatFrame* frame,
                                           int64_t* tile_row_isects) {
  SPLAT_ENTER(call, Stages::tile_row_isects(*view, *gaussians, *frame, tile_row_isects), call, view, gaussians, frame)
}

SPLAT_EXPORT int64_t splat_bin_bytes(const SplatCall* call, const SplatView* view, const SplatFrame* frame) {
  if (const char* f = first_fault(call, view, frame)) return fail(__func__, f);
  SPLAT_DISPATCH(call, return Stages::bin_bytes(*view, *frame))
}

SPLAT_EXPORT int32_t splat_bin(const SplatCall* call, const SplatView* view, const SplatGaussians* gaussians,
                               SplatFrame* frame) {
  if (const char* f = first_fault(call, view, gaussians, frame)) return fail(__func__, f);
  if (frame->max_isects > int64_t(UINT32_MAX)) return fail(__func__, "more than 2^32 - 1 tile intersections");
  if (frame->workspace_bytes < splat_bin_bytes(call, view, frame)) return fail(__func__, "the workspace is too small");
  SPLAT_ENTER(call, Stages::bin(*call, *view, *gaussians, *frame), call)
}

SPLAT_EXPORT int32_t splat_blend(const SplatCall* call, const SplatView* view, const SplatFrame* frame,
                                 const void* background, const SplatImages* out) {
  SPLAT_ENTER(call, Stages::blend(*call, *view, *frame, background, *out), call, view, frame, out)
}

SPLAT_EXPORT int32_t splat_blend_vjp(const SplatCall* call, const SplatView* view, const SplatFrame* frame,
                                     const void* background, const SplatImages* out, const SplatImages* v_out,
                                     void* background_partials, void* v_background) {
  SPLAT_ENTER(call,
              Stages::blend_vjp(*call, *view, *frame, background, *out, *v_out, background_partials, v_background),
              call, view, frame, out, v_out)
}

SPLAT_EXPORT int32_t splat_sum_isect_grads(const SplatCall* call, const SplatGaussians* gaussians,
                                           const SplatFrame* frame, void* sums, uint32_t* reached) {
  SPLAT_ENTER(call, Stages::sum_isect_grads(*call, *gaussians, *frame, sums, reached), call, gaussians, frame)
}

SPLAT_EXPORT int32_t splat_project_vjp(const SplatCall* call, const SplatView* view, const SplatGaussians* gaussians,
                                       const SplatFrame* frame, const SplatProjectGrad* grad) {
  if (const char* f = first_fault(call, view, gaussians, frame, grad)) return fail(__func__, f);
  for (const char* f : {misfit(view, gaussians), misfit(gaussians, grad->gradients), misfit(gaussians, grad->adam)})
    if (f != nullptr) return fail(__func__, f);
  SPLAT_ENTER(call, Stages::project_vjp(*call, *view, *gaussians, *frame, *grad), call)
}

SPLAT_EXPORT int32_t splat_pose_vjp(const SplatCall* call, const SplatView* view, const SplatFrame* frame,
                                    const void* pose_partials, int64_t chunks, void* v_viewmat) {
  SPLAT_ENTER(call, Stages::pose_vjp(*view, pose_partials, chunks, v_viewmat), call, view, frame)
}

SPLAT_EXPORT int64_t splat_loss_bytes(const SplatCall* call, const SplatLoss* loss) {
  if (const char* f = first_fault(call, loss)) return fail(__func__, f);
  SPLAT_DISPATCH(call, return Stages::loss_bytes(*loss))
}

SPLAT_EXPORT int32_t splat_loss(const SplatCall* call, SplatLoss* loss) {
  SPLAT_ENTER(call, Stages::loss(*call, *loss), call, loss)
}

SPLAT_EXPORT int32_t splat_adam(const SplatCall* call, const SplatGaussians* params, const SplatGaussians* gradients,
                                const SplatAdam* adam) {
  if (const char* f = first_fault(call, params, gradients, adam)) return fail(__func__, f);
  for (const char* f : {misfit(params, gradients), misfit(params, adam)})
    if (f != nullptr) return fail(__func__, f);
  SPLAT_ENTER(call, Stages::adam(*call, *params, *gradients, *adam), call)
}

SPLAT_EXPORT int32_t splat_noise(const SplatCall* call, const SplatGaussians* gaussians, const SplatNoise* noise) {
  SPLAT_ENTER(call, Stages::noise(*call, *gaussians, *noise), call, gaussians, noise)
}
