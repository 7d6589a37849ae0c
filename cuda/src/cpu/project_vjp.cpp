// Backward through projection, colours and activation, to the raw parameters and the pose; then Adam, if wanted, while
// the gradients of a chunk are still in the cache. docs/math.md 2 to 4, 6.2 and 8.
#include <algorithm>
#include <cstring>

#include "geometry.h"
#include "optimise.h"
#include "pool.h"

namespace splat {
namespace {

template <class Real>
struct ChunkProjectorVjp {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatGaussians& gaussians;
  const SplatFrame& frame;
  const SplatProjectGrad& grad;
  const View<Real> camera;

  // Gradients of a chunk, group by group, when they are used at once and not kept.
  struct Scratch {
    alignas(64) Real numbers[kChunk * (3 + 4 + 3 + 1 + 3 + 72)];
  };

  void operator()(int64_t chunk) const {
    const int64_t begin = chunk * kChunk, end = std::min(gaussians.n, begin + kChunk);
    Scratch scratch;
    Real* grads[kGroups];
    Real* at = scratch.numbers;
    for (int group = 0; group < kGroups; ++group) {
      const int64_t width = group_width(gaussians, group);
      grads[group] = at;
      if (grad.gradients != nullptr)
        grads[group] = static_cast<Real*>(group_of(*grad.gradients, group)) + begin * width;
      std::fill_n(grads[group], (end - begin) * width, Real(0));  // without shN there is no array to fill
      at += kChunk * width;
    }

    ViewGrad<F> pose;
    std::memset(&pose, 0, sizeof pose);
    const int visible = int(frame.chunk_counts[2 * chunk]);
    for (int i = 0; i < visible; i += kLanes)
      sixteen(begin, begin + i, std::min(kLanes, visible - i), grads, grad.pose_partials != nullptr ? &pose : nullptr);
    if (grad.pose_partials != nullptr) store_pose(pose, static_cast<Real*>(grad.pose_partials) + chunk * SPLAT_POSE);
    if (grad.adam == nullptr) return;
    const bool later = grad.adam->sh_last_step != nullptr;
    adam_rows<Real>(gaussians, *grad.adam, begin, end, view.sh_degree, grads, later ? kGroups - 1 : kGroups);
    if (later)
      adam_shN<Real>(gaussians, *grad.adam, begin, frame.ids + begin, visible, view.sh_degree, grads[kGroups - 1]);
  }

  static void store_pose(const ViewGrad<F>& pose, Real* out) {
    for (int k = 0; k < 9; ++k) out[k] = sum(pose.rotation[k]);
    for (int k = 0; k < 3; ++k) out[9 + k] = sum(pose.translation[k]), out[12 + k] = sum(pose.center[k]);
  }

  // Those of the Gaussians after it follow in memory; blend_vjp has written them in another order.
  static constexpr int kRowsAhead = 64;

  // The sum of the intersection gradients of one Gaussian, in their order.
  SPLAT_INLINE void sum_isect_grads(int64_t slot, Real* out) const {
    const Real* grad_row =
        static_cast<const Real*>(frame.isect_grads) + int64_t(frame.isect_grad_starts[slot]) * kIsectGradSize;
    F total = F(0);
    for (uint32_t k = 0; k < frame.tiles_per_gauss[slot]; ++k, grad_row += kIsectGradSize) {
      __builtin_prefetch(grad_row + kRowsAhead * kIsectGradSize);
      total += F::load(grad_row);
    }
    total.store(out);
  }

  // Visible Gaussians from slot `first` on, of the chunk that begins at Gaussian `base`.
  void sixteen(int64_t base, int64_t first, int count, Real* const* grads, ViewGrad<F>* pose) const {
    int32_t lane_ids[kLanes];
    alignas(64) Real sums[kLanes][kIsectGradSize];
    Real reached[kLanes];
    int used = 0;
    prefetch_shN<Real>(gaussians, frame.ids + first, count, view.sh_degree);
    for (int k = 0; k < kLanes; ++k) {
      const int64_t slot = first + (k < count ? k : count - 1);
      lane_ids[k] = frame.ids[slot] - int32_t(base);
      reached[k] = Real(k < count && frame.tiles_per_gauss[slot] != 0);
      used += reached[k] != 0;
      if (reached[k] != 0) sum_isect_grads(slot, sums[k]);
      else std::memset(sums[k], 0, sizeof sums[k]);
    }
    if (used == 0) return;
    const auto live = F::load(reached) > F(0);
    F grads_2d[kIsectGradUsed];
    int32_t index[kLanes];
    for (int k = 0; k < kLanes; ++k) index[k] = k * kIsectGradSize;
    for (int f = 0; f < kIsectGradUsed; ++f) grads_2d[f] = gather<Real, kLanes>(&sums[0][0] + f, index);

    const RawGeometry<F> raw = load_geometry<Real>(gaussians, base, lane_ids, view.filter_3d);
    RawGeometry<F> v_raw;
    std::memset(&v_raw, 0, sizeof v_raw);
    F v_mean2d[2];
    ViewGrad<F> v_view;
    std::memset(&v_view, 0, sizeof v_view);
    ViewGrad<F>* v_pose = pose == nullptr ? nullptr : &v_view;
    if (camera.model == kPinhole)
      geometry<true>(raw, grads_2d, lane_ids, live, grads, v_raw, v_mean2d, v_pose);
    else
      geometry<false>(raw, grads_2d, lane_ids, live, grads, v_raw, v_mean2d, v_pose);
    colours(raw.mean, grads_2d, base, lane_ids, live, grads, v_raw.mean, v_pose);
    store_rows<3>(v_raw.mean, live, lane_ids, grads[0]);
    if (pose != nullptr) add_pose(v_view, live, *pose);
    if (frame.with_abs) {
      for (int k = 0; k < 2; ++k) v_mean2d[k] = grads_2d[kGradAbsX + k] * F(Real(1.0 / kLog2E));
    }
    statistics(v_mean2d, live, base, lane_ids);
  }

  template <bool PINHOLE>
  SPLAT_INLINE void geometry(const RawGeometry<F>& raw, const F* grads_2d, const int32_t* lane_ids,
                             const typename F::Mask& live, Real* const* grads, RawGeometry<F>& v_raw,
                             F* v_mean2d, ViewGrad<F>* v_pose) const {
    const ProjectedGeometry<F> g =
        project_geometry<PINHOLE>(camera, raw, view.antialiased != 0, view.filter_3d != nullptr);
    Conic<F> v_conic;
    F v_log_opacity;
    isect_grad_vjp(grads_2d, g.conic.a, g.conic.b, g.conic.c, v_mean2d, v_conic.a, v_conic.b, v_conic.c, v_log_opacity);
    project_geometry_vjp<PINHOLE>(camera, raw, g, view.antialiased != 0, view.filter_3d != nullptr, v_mean2d, v_conic,
                                  v_log_opacity, grads_2d[kGradDepth], v_raw, v_pose);
    store_rows<4>(v_raw.quat, live, lane_ids, grads[1]);
    store_rows<3>(v_raw.log_scale, live, lane_ids, grads[2]);
    store_rows<1>(&v_raw.logit, live, lane_ids, grads[3]);
  }

  SPLAT_INLINE void colours(const F* mean, const F* grads_2d, int64_t base, const int32_t* lane_ids,
                            const typename F::Mask& live, Real* const* grads, F* v_mean, ViewGrad<F>* v_pose) const {
    F direction[3], basis[24], shN[72], sum[3], v_colour[3], v_dc[3];
    const F inv_length = view_direction(camera.center, mean, direction);
    sh_basis(view.sh_degree, direction, basis);
    load_shN<Real>(gaussians, base, lane_ids, view.sh_degree, shN);
    sh_sum<Real>(gaussians, base, lane_ids, view.sh_degree, shN, basis, sum);
    for (int c = 0; c < 3; ++c) {
      v_colour[c] = sh_colour_vjp(sum[c], grads_2d[kGradRed + c]);
      v_dc[c] = v_colour[c] * F(kSh0);
    }
    store_rows<3>(v_dc, live, lane_ids, grads[4]);
    const int count = shN_count(view.sh_degree);
    if (count == 0) return;

    // A coefficient's gradient is basis times colour gradient; the basis' own takes the coefficients.
    F v_basis[24], v_shN[72];
    for (int k = 0; k < count; ++k) {
      v_basis[k] = shN[3 * k] * v_colour[0] + shN[3 * k + 1] * v_colour[1] + shN[3 * k + 2] * v_colour[2];
      for (int c = 0; c < 3; ++c) v_shN[3 * k + c] = basis[k] * v_colour[c];
    }
    store_shN(v_shN, live.bits(), lane_ids, 3 * gaussians.shN_count, view.sh_degree, grads[5]);
    F v_direction[3] = {F(0), F(0), F(0)};
    sh_basis_vjp(view.sh_degree, direction, v_basis, v_direction);
    view_direction_vjp(direction, inv_length, v_direction, v_mean, v_pose == nullptr ? nullptr : v_pose->center);
  }

  template <int C>
  SPLAT_INLINE void store_rows(const F* values, const typename F::Mask& live, const int32_t* lane_ids,
                               Real* out) const {
    Real lanes[C][kLanes];
    for (int c = 0; c < C; ++c) values[c].store(lanes[c]);
    for (uint32_t bits = live.bits(); bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      for (int c = 0; c < C; ++c) out[C * lane_ids[lane] + c] = lanes[c][lane];
    }
  }

  static void add_pose(const ViewGrad<F>& from, const typename F::Mask& live, ViewGrad<F>& to) {
    for (int k = 0; k < 9; ++k) to.rotation[k] += select(live, from.rotation[k], F(0));
    for (int k = 0; k < 3; ++k) {
      to.translation[k] += select(live, from.translation[k], F(0));
      to.center[k] += select(live, from.center[k], F(0));
    }
  }

  SPLAT_INLINE void statistics(const F* v_mean2d, const typename F::Mask& live, int64_t base,
                               const int32_t* lane_ids) const {
    if (grad.grad2d == nullptr) return;
    const F x = v_mean2d[0] * F(Real(0.5) * camera.width), y = v_mean2d[1] * F(Real(0.5) * camera.height);
    Real norm[kLanes];
    sqrt_(x * x + y * y).store(norm);
    Real* grad2d = static_cast<Real*>(grad.grad2d) + base;
    Real* seen = static_cast<Real*>(grad.count) + base;
    for (uint32_t bits = live.bits(); bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      grad2d[lane_ids[lane]] += norm[lane];
      seen[lane_ids[lane]] += Real(1);
    }
  }
};

}  // namespace

template <class Real>
void Stages<Real>::project_vjp(const SplatCall& call, const SplatView& view, const SplatGaussians& gaussians,
                               const SplatFrame& frame, const SplatProjectGrad& grad) {
  parallel_for(call.threads, chunks_of(gaussians.n),
               ChunkProjectorVjp<Real>{view, gaussians, frame, grad, camera_of<Real>(view)});
}

// Chunk by chunk, in order; the camera centre -R^T t is a function of the pose too. docs/math.md 3.7
template <class Real>
void Stages<Real>::pose_vjp(const SplatView& view, const void* pose_partials, int64_t chunks, void* v_viewmat) {
  Real sum[SPLAT_POSE] = {};
  const Real* partials = static_cast<const Real*>(pose_partials);
  for (int64_t c = 0; c < chunks; ++c)
    for (int k = 0; k < 15; ++k) sum[k] += partials[c * SPLAT_POSE + k];
  Real* out = static_cast<Real*>(v_viewmat);
  std::memset(out, 0, 16 * sizeof(Real));
  for (int i = 0; i < 3; ++i) {
    Real v_t = sum[9 + i];
    for (int j = 0; j < 3; ++j) {
      out[4 * i + j] = sum[3 * i + j] - Real(view.viewmat[4 * i + 3]) * sum[12 + j];
      v_t -= Real(view.viewmat[4 * i + j]) * sum[12 + j];
    }
    out[4 * i + 3] = v_t;
  }
}

template <class Real>
void Stages<Real>::adam(const SplatCall& call, const SplatGaussians& params, const SplatGaussians& gradients,
                        const SplatAdam& adam) {
  parallel_for(call.threads, chunks_of(params.n), [&](int64_t chunk) {
    const int64_t begin = chunk * kChunk, end = std::min(params.n, begin + kChunk);
    const Real* grads[kGroups];
    for (int group = 0; group < kGroups; ++group)
      grads[group] = static_cast<const Real*>(group_of(gradients, group)) + begin * group_width(params, group);
    adam_rows<Real>(params, adam, begin, end, 4, grads);
  });
}

#define SPLAT_INSTANTIATE(Real)                                                                                    \
  template void Stages<Real>::project_vjp(const SplatCall&, const SplatView&, const SplatGaussians&,               \
                                          const SplatFrame&, const SplatProjectGrad&);                             \
  template void Stages<Real>::pose_vjp(const SplatView&, const void*, int64_t, void*);                             \
  template void Stages<Real>::adam(const SplatCall&, const SplatGaussians&, const SplatGaussians&, const SplatAdam&);
SPLAT_INSTANTIATE(float)
#ifdef SPLAT_WITH_DOUBLE
SPLAT_INSTANTIATE(double)
#endif

}  // namespace splat
