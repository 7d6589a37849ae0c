// From a raw Gaussian to its ellipse, and back: the functions of activation.h and projection.h in their order.
// docs/math.md 2 and 3
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
// g: project_geometry's result for `raw`. v_log_opacity: of the logarithm of the opacity after compensation and filter.
// v_depth: of g.pc[2] as the depth that is blended. v_raw: its filter_3d is left alone, which has no gradient.
template <bool PINHOLE, class F, class Real>
SPLAT_HD_FORCED void project_geometry_vjp(const View<Real>& view, const RawGeometry<F>& raw,
                                          const ProjectedGeometry<F>& g, bool antialiased, bool filtered,
                                          const F* v_mean2d, const Conic<F>& v_conic, F v_log_opacity, F v_depth,
                                          RawGeometry<F>& v_raw, ViewGrad<F>* v_view) {
  F v_a = F(0), v_b = F(0), v_c = F(0);
  conic_vjp(g.conic, v_conic.a, v_conic.b, v_conic.c, v_a, v_b, v_c);

  // log(opacity * compensation): its factors share the gradient of the logarithm, that of the 3D filter too.
  F v_compensation = F(0);
  activate_opacity_vjp(g.opacity, v_log_opacity / g.opacity, v_raw.logit);
  if (antialiased) v_compensation = v_log_opacity / g.cov.compensation;

  F v_row0[3], v_row1[3], v_scale[3], v_root[9], v_rotation[9];
  for (int k = 0; k < 3; ++k) v_row0[k] = v_row1[k] = v_scale[k] = F(0);
  for (int k = 0; k < 9; ++k) v_root[k] = v_rotation[k] = F(0);
  covariance2d_vjp(g.affine.row0, g.affine.row1, g.root, g.cov, v_a, v_b, v_c, v_compensation, v_row0, v_row1,
                   v_root);
  covariance_root_vjp(g.rotation, g.scale, v_root, v_rotation, v_scale);
  quat_to_rotation_vjp(raw.quat, v_rotation, v_raw.quat);
  for (int k = 0; k < 3; ++k) activate_scale_vjp(g.scale[k], v_scale[k], v_raw.log_scale[k]);
  if (filtered) filter_3d_vjp(raw, v_log_opacity, v_raw.log_scale);

  F v_pc[3] = {F(0), F(0), v_depth};
  project_point_vjp<PINHOLE>(view, g.pc, g.affine, v_row0, v_row1, v_mean2d, v_pc, v_view);
  world_to_camera_vjp(view, raw.mean, v_pc, v_raw.mean, v_view);
}

}  // namespace splat
