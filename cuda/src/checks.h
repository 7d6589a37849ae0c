// Checks of the arguments of every entry, and the error message. Shared by the CPU and the CUDA side of the ABI;
// included once a library.
#pragma once
#include <cstdint>
#include <cstdio>

#include "../include/splat.h"

#define SPLAT_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local char last_error[512] = "";

int32_t fail(const char* what, const char* detail) {
  std::snprintf(last_error, sizeof last_error, "%s: %s", what, detail);
  return -1;
}

template <class Struct>
bool sized(const Struct* s) {
  return s != nullptr && s->struct_size == sizeof(Struct);
}

#ifdef SPLAT_WITH_DOUBLE
constexpr bool kHasDouble = true;
#else
constexpr bool kHasDouble = false;
#endif

#ifndef SPLAT_MIN_THREADS
#define SPLAT_MIN_THREADS 1  // a device library has no use for them
#endif

const char* fault(const SplatCall* call) {
  if (!sized(call)) return "SplatCall has another size than in this library's splat.h";
  if (call->threads < SPLAT_MIN_THREADS) return "threads must be at least 1";
  if (call->dtype != SPLAT_FLOAT32 && !(kHasDouble && call->dtype == SPLAT_FLOAT64))
    return "this build has no such dtype";
  return nullptr;
}
const char* fault(const SplatView* view) {
  if (!sized(view)) return "SplatView has another size than in this library's splat.h";
  if (view->width < 1 || view->height < 1) return "the image has no pixels";
  if (view->sh_degree < 0 || view->sh_degree > 4) return "sh_degree is not in 0..4";
  if (view->camera_model < SPLAT_CAMERA_PINHOLE || view->camera_model > SPLAT_CAMERA_FISHEYE)
    return "there is no such camera_model";
  const int32_t tile_rows = int32_t((int64_t(view->height) + SPLAT_TILE - 1) / SPLAT_TILE);
  if (view->tile_row_begin < 0 || view->tile_row_begin >= view->tile_row_end || view->tile_row_end > tile_rows)
    return "the tile rows are not in the image";
  return nullptr;
}
const char* fault(const SplatGaussians* g) {
  if (!sized(g)) return "SplatGaussians has another size than in this library's splat.h";
  if (g->n < 0 || g->n > INT32_MAX) return "n is negative or beyond 2^31 - 1";
  for (int degree = 0; degree <= 4; ++degree)
    if (g->shN_count == (degree + 1) * (degree + 1) - 1) return nullptr;
  return "shN_count is not 0, 3, 8, 15 or 24";
}
const char* fault(const SplatChannels* channels) {
  if (!sized(channels)) return "SplatChannels has another size than in this library's splat.h";
  if (channels->count < 1 || channels->n < 0 || channels->n > INT32_MAX) return "the channels have no shape";
  return channels->v_colors != nullptr && channels->isect_grads == nullptr ? "v_colors need isect_grads" : nullptr;
}
const char* fault(const SplatFrame* frame) {
  if (!sized(frame)) return "SplatFrame has another size than in this library's splat.h";
  return frame->channels == nullptr ? nullptr : fault(frame->channels);
}
const char* fault(const SplatImages* images) {
  return sized(images) ? nullptr : "SplatImages has another size than in this library's splat.h";
}
const char* fault(const SplatLoss* loss) {
  if (!sized(loss)) return "SplatLoss has another size than in this library's splat.h";
  if (loss->width < 1 || loss->height < 1 || loss->images < 1) return "no pixels";
  if (int64_t(loss->height) * loss->images > INT32_MAX) return "the stack has more than 2^31 - 1 rows";
  if (loss->channels != 1 && loss->channels != 3) return "channels is neither 1 nor 3";
  if (loss->border < 0 || 2 * int64_t(loss->border) >= loss->width || 2 * int64_t(loss->border) >= loss->height)
    return "the border leaves no pixel";
  return loss->mask != nullptr && loss->v_image != nullptr ? "with a mask there is no gradient" : nullptr;
}
const char* fault(const SplatAdam* adam) {
  if (!sized(adam)) return "SplatAdam has another size than in this library's splat.h";
  if (adam->step < 1) return "Adam steps are counted from 1";
  if (!(adam->size_power >= 0.0) || !(adam->log_size - adam->log_size == 0.0))
    return "size_power is negative, or log_size not finite";
  if (adam->sh_last_step != nullptr && (adam->decay_table == nullptr || adam->decay_rows < 1))
    return "decay_table is missing";
  const char* f = fault(&adam->exp_avg);
  return f != nullptr ? f : fault(&adam->exp_avg_sq);
}
// The Adam that leaves shN of invisible Gaussians for later, or null.
const SplatAdam* lazy_adam(const SplatAdam* adam) {
  return adam != nullptr && adam->sh_last_step != nullptr ? adam : nullptr;
}

const char* fault(const SplatProjectGrad* grad) {
  if (!sized(grad)) return "SplatProjectGrad has another size than in this library's splat.h";
  if (grad->gradients != nullptr && lazy_adam(grad->adam) != nullptr) return "gradients are not kept with sh_last_step";
  const char* f = grad->gradients == nullptr ? nullptr : fault(grad->gradients);
  return f != nullptr || grad->adam == nullptr ? f : fault(grad->adam);
}
const char* fault(const SplatNoise* noise) {
  return sized(noise) ? nullptr : "SplatNoise has another size than in this library's splat.h";
}
const char* first_fault() { return nullptr; }
template <class A, class... Rest>
const char* first_fault(A a, Rest... rest) {
  const char* f = fault(a);
  return f != nullptr ? f : first_fault(rest...);
}

// Shapes that do not fit together would be read or written beyond their ends.
const char* misfit(const SplatView* view, const SplatGaussians* g) {
  const int32_t wanted = (view->sh_degree + 1) * (view->sh_degree + 1) - 1;
  return wanted <= g->shN_count ? nullptr : "sh_degree needs more coefficients than shN has";
}
const char* misfit(const SplatGaussians* g, const SplatGaussians* gradients) {
  const bool same = gradients == nullptr || (gradients->n == g->n && gradients->shN_count == g->shN_count);
  return same ? nullptr : "the gradients have another shape than the Gaussians";
}
const char* misfit(const SplatGaussians* g, const SplatAdam* adam) {
  if (adam == nullptr) return nullptr;
  const bool same = misfit(g, &adam->exp_avg) == nullptr && misfit(g, &adam->exp_avg_sq) == nullptr;
  return same ? nullptr : "the moments have another shape than the Gaussians";
}

}  // namespace
