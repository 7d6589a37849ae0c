// From a raw Gaussian to its ellipse, in the order that projection and its backward pass share. docs/math.md 3.
#pragma once
#include "projection.h"

namespace splat {

constexpr double kHuge = 1e30;  // larger extents are not binned

template <class F>
struct RawGeometry {
  F mean[3], quat[4], log_scale[3], logit;
  F filter_3d;  // read only where there is a 3D filter
};

template <class F>
struct ProjectedGeometry {
  F pc[3], mean2d[2], quat_norm2;
  F rotation[9], scale[3], root[9];
  F opacity;       // before compensation and 3D filter
  F log2_opacity;  // after them
  Affine<F> affine;
  Covariance2d<F> cov;
  Conic<F> conic;
};
// PINHOLE: whether view.model is that; a parameter, so that the other models cost it nothing.
template <bool PINHOLE, class F, class Real>
SPLAT_HD_FORCED ProjectedGeometry<F> project_geometry(const View<Real>& view, const RawGeometry<F>& raw,
                                                      bool antialiased, bool filtered) {
  ProjectedGeometry<F> g;
  world_to_camera(view, raw.mean, g.pc);
  g.quat_norm2 = raw.quat[0] * raw.quat[0] + raw.quat[1] * raw.quat[1] + raw.quat[2] * raw.quat[2] +
                 raw.quat[3] * raw.quat[3];
  quat_to_rotation(raw.quat, g.rotation);
  for (int k = 0; k < 3; ++k) g.scale[k] = activate_scale(raw.log_scale[k]);
  F share = F(1);
  if (filtered) {
    for (int k = 0; k < 3; ++k) share = share * filter_3d_scale(raw.filter_3d, g.scale[k]);
  }
  covariance_root(g.rotation, g.scale, g.root);
  g.affine = project_point<PINHOLE>(view, g.pc, g.mean2d);
  g.cov = covariance2d(g.affine.row0, g.affine.row1, g.root);
  g.conic = conic(g.cov);
  g.opacity = activate_opacity(raw.logit);
  F opacity = antialiased ? g.opacity * g.cov.compensation : g.opacity;
  if (filtered) opacity = opacity * share;
  g.log2_opacity = log2_(opacity);
  return g;
}
// From v_log_scale, the gradient by the logarithms of the blurred scales, to that by the stored ones; v_log_opacity is
// shared by all factors of the opacity.
template <class F>
SPLAT_HD_FORCED void filter_3d_vjp(const RawGeometry<F>& raw, F v_log_opacity, F* v_log_scale) {
  for (int k = 0; k < 3; ++k) {
    F wide = activate_scale(raw.log_scale[k]);
    const F share = filter_3d_scale(raw.filter_3d, wide);
    filter_3d_scale_vjp(share, v_log_opacity, v_log_scale[k]);
  }
}

}  // namespace splat
