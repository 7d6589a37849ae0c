// From a Gaussian in the world to an ellipse in the image: docs/math.md 3.
#pragma once
#include "activation.h"

namespace splat {

constexpr double kBlur = 0.3;            // px^2 added to the image covariance, the field's value
constexpr double kMinQuatNorm2 = 1e-8;   // below it a quaternion has no direction
constexpr double kClampMargin = 0.15;    // of the image size: how far outside the Jacobian follows the mean

// How a camera point becomes a pixel; the numbers are SplatView's.
enum CameraModel : int32_t { kPinhole = 0, kOrtho = 1, kFisheye = 2 };

// A view; S is a plain scalar, shared by all lanes.
template <class S>
struct View {
  S rotation[9], translation[3];  // world to camera
  S fx, fy, cx, cy, width, height, z_near, z_far;
  S x_min, x_max, y_min, y_max;  // 3.3: bounds of x/z and y/z in the pinhole's Jacobian
  S center[3];                   // camera position in the world
  int32_t model;                 // CameraModel
};

template <class S>
SPLAT_HD View<S> make_view(int32_t model, const double* viewmat, double fx, double fy, double cx, double cy, double width,
                           double height, double z_near, double z_far) {
  View<S> v;
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) v.rotation[3 * i + j] = S(viewmat[4 * i + j]);
    v.translation[i] = S(viewmat[4 * i + 3]);
  }
  for (int j = 0; j < 3; ++j) {
    v.center[j] = S(-(viewmat[j] * viewmat[3] + viewmat[4 + j] * viewmat[7] + viewmat[8 + j] * viewmat[11]));
  }
  v.fx = S(fx), v.fy = S(fy), v.cx = S(cx), v.cy = S(cy);
  v.width = S(width), v.height = S(height), v.z_near = S(z_near), v.z_far = S(z_far);
  v.x_min = S((-kClampMargin * width - cx) / fx), v.x_max = S(((1 + kClampMargin) * width - cx) / fx);
  v.y_min = S((-kClampMargin * height - cy) / fy), v.y_max = S(((1 + kClampMargin) * height - cy) / fy);
  v.model = model;
  return v;
}

// Gradient of a loss with respect to the view's pose.
template <class T>
struct ViewGrad {
  T rotation[9], translation[3], center[3];
};

// 3.1  Camera coordinates of a world point.
template <class T, class S>
SPLAT_HD void world_to_camera(const View<S>& view, const T* p, T* pc) {
  for (int i = 0; i < 3; ++i) {
    pc[i] = p[0] * T(view.rotation[3 * i]) + p[1] * T(view.rotation[3 * i + 1]) + p[2] * T(view.rotation[3 * i + 2]) +
            T(view.translation[i]);
  }
}
template <class T, class S>
SPLAT_HD void world_to_camera_vjp(const View<S>& view, const T* p, const T* v_pc, T* v_p, ViewGrad<T>* v_view) {
  for (int j = 0; j < 3; ++j) {
    v_p[j] += v_pc[0] * T(view.rotation[j]) + v_pc[1] * T(view.rotation[3 + j]) + v_pc[2] * T(view.rotation[6 + j]);
  }
  if (v_view == nullptr) return;
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) v_view->rotation[3 * i + j] += v_pc[i] * p[j];
    v_view->translation[i] += v_pc[i];
  }
}

// 3.2  M = R S, the square root of the world covariance M M^T.
template <class T>
SPLAT_HD void covariance_root(const T* rotation, const T* scale, T* root) {
  for (int i = 0; i < 3; ++i)
    for (int k = 0; k < 3; ++k) root[3 * i + k] = rotation[3 * i + k] * scale[k];
}
template <class T>
SPLAT_HD void covariance_root_vjp(const T* rotation, const T* scale, const T* v_root, T* v_rotation, T* v_scale) {
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 3; ++k) {
      v_rotation[3 * i + k] += v_root[3 * i + k] * scale[k];
      v_scale[k] += v_root[3 * i + k] * rotation[3 * i + k];
    }
  }
}

// 3.3  The affine map around a point: rows of J R_w; of a pinhole with 1/z and the clamped x/z, y/z that made it.
template <class T>
struct Affine {
  T row0[3], row1[3];
  T inv_z, tx, ty;
};
template <class T, class S>
SPLAT_HD Affine<T> affine_map(const View<S>& view, const T* pc) {
  Affine<T> m;
  m.inv_z = T(1) / pc[2];
  m.tx = clamp_(pc[0] * m.inv_z, T(view.x_min), T(view.x_max));
  m.ty = clamp_(pc[1] * m.inv_z, T(view.y_min), T(view.y_max));
  const T jx = m.inv_z * T(view.fx), jy = m.inv_z * T(view.fy);
  for (int k = 0; k < 3; ++k) {
    m.row0[k] = jx * (T(view.rotation[k]) - m.tx * T(view.rotation[6 + k]));
    m.row1[k] = jy * (T(view.rotation[3 + k]) - m.ty * T(view.rotation[6 + k]));
  }
  return m;
}
template <class T, class S>
SPLAT_HD void affine_map_vjp(const View<S>& view, const T* pc, const Affine<T>& m, const T* v_row0, const T* v_row1,
                             T* v_pc, ViewGrad<T>* v_view) {
  const T w0[3] = {T(view.rotation[0]), T(view.rotation[1]), T(view.rotation[2])};
  const T w1[3] = {T(view.rotation[3]), T(view.rotation[4]), T(view.rotation[5])};
  const T w2[3] = {T(view.rotation[6]), T(view.rotation[7]), T(view.rotation[8])};
  const T jx = m.inv_z * T(view.fx), jy = m.inv_z * T(view.fy);
  const T g0 = dot3(v_row0, w0), g02 = dot3(v_row0, w2), g1 = dot3(v_row1, w1), g12 = dot3(v_row1, w2);
  const T v_tx = -jx * g02, v_ty = -jy * g12;
  const T v_jx = g0 - m.tx * g02, v_jy = g1 - m.ty * g12;
  T v_inv_z = v_jx * T(view.fx) + v_jy * T(view.fy);
  // Where x/z was clamped, it is a constant.
  const T x_ratio = pc[0] * m.inv_z, y_ratio = pc[1] * m.inv_z;
  const T live_x = select((x_ratio >= T(view.x_min)) & (x_ratio <= T(view.x_max)), v_tx, T(0));
  const T live_y = select((y_ratio >= T(view.y_min)) & (y_ratio <= T(view.y_max)), v_ty, T(0));
  v_pc[0] += live_x * m.inv_z;
  v_pc[1] += live_y * m.inv_z;
  v_inv_z += live_x * pc[0] + live_y * pc[1];
  v_pc[2] -= v_inv_z * m.inv_z * m.inv_z;
  if (v_view == nullptr) return;
  for (int k = 0; k < 3; ++k) {
    v_view->rotation[k] += jx * v_row0[k];
    v_view->rotation[3 + k] += jy * v_row1[k];
    v_view->rotation[6 + k] -= jx * m.tx * v_row0[k] + jy * m.ty * v_row1[k];
  }
}

// 3.1  Image position of a camera point.
template <class T, class S>
SPLAT_HD void camera_to_image(const View<S>& view, const T* pc, T inv_z, T* mean2d) {
  mean2d[0] = pc[0] * inv_z * T(view.fx) + T(view.cx);
  mean2d[1] = pc[1] * inv_z * T(view.fy) + T(view.cy);
}
template <class T, class S>
SPLAT_HD void camera_to_image_vjp(const View<S>& view, const T* pc, T inv_z, const T* v_mean2d, T* v_pc) {
  const T gx = v_mean2d[0] * T(view.fx) * inv_z, gy = v_mean2d[1] * T(view.fy) * inv_z;
  v_pc[0] += gx;
  v_pc[1] += gy;
  v_pc[2] -= (gx * pc[0] + gy * pc[1]) * inv_z;
}

// 3.9  A pixel of another model than the pinhole's, and its derivative J by the camera point, row by row.
template <class T>
struct PixelMap {
  T mean2d[2], j[6];
};
// Orthographic: fx and fy are pixels a world unit.
template <class T, class S>
SPLAT_HD PixelMap<T> ortho_map(const View<S>& view, const T* pc) {
  const T fx = T(view.fx), fy = T(view.fy), none = T(0);
  return {{pc[0] * fx + T(view.cx), pc[1] * fy + T(view.cy)}, {fx, none, none, none, fy, none}};
}

// 3.10  Equidistant fisheye. What J is made of, at the point divided by the larger of z and its distance from the axis:
// s = angle from the axis / distance from it, q, A and D.
template <class T>
struct Fisheye {
  T x, y, z, inv_scale;
  T s, q, a, d;
};
template <class T>
SPLAT_HD_FORCED Fisheye<T> fisheye(const T* pc) {
  const T axis2 = pc[0] * pc[0] + pc[1] * pc[1], axis = sqrt_(axis2);
  const auto narrow = axis <= pc[2];  // within 45 degrees of the axis
  Fisheye<T> f;
  f.inv_scale = T(1) / select(narrow, pc[2], axis);
  f.x = pc[0] * f.inv_scale, f.y = pc[1] * f.inv_scale, f.z = pc[2] * f.inv_scale;
  const T t = select(narrow, axis * f.inv_scale, f.z), w = t * t;
  const T rest = atan_rest(w), tail = rest * w - T(1.0 / 3.0);  // atan(t) = t (1 + w tail)
  f.q = T(1) / (w + T(1));
  const T wide = T(1.5707963267948966) - (tail * w * t + t);
  f.s = select(narrow, tail * w + T(1), wide);
  f.a = select(narrow, -(f.q + tail), t * f.q - wide);
  f.d = select(narrow, (T(0.5) - w * T(0.5)) * f.q * f.q + rest * T(1.5), -(t * f.q * f.q + f.a * T(1.5)));
  return f;
}
template <class T, class S>
SPLAT_HD_FORCED PixelMap<T> fisheye_map(const View<S>& view, const T* pc) {
  const Fisheye<T> f = fisheye(pc);
  const T fx = T(view.fx), fy = T(view.fy), jx = f.inv_scale * fx, jy = f.inv_scale * fy;
  const T across = f.a * f.x * f.y;
  return {{f.x * f.s * fx + T(view.cx), f.y * f.s * fy + T(view.cy)},
          {jx * (f.a * f.x * f.x + f.s), jx * across, -(jx * f.x * f.q),  //
           jy * across, jy * (f.a * f.y * f.y + f.s), -(jy * f.y * f.q)}};
}
// Only the part through J: that through the pixel is J^T v_mean2d.
template <class T, class S>
SPLAT_HD_FORCED void fisheye_map_vjp(const View<S>& view, const T* pc, const T* v_j, T* v_pc) {
  const Fisheye<T> f = fisheye(pc);
  const T fx = T(view.fx), fy = T(view.fy);
  const T xx = v_j[0] * fx, yy = v_j[4] * fy, xy = v_j[1] * fx + v_j[3] * fy, xz = v_j[2] * fx, yz = v_j[5] * fy;
  const T v_s = xx + yy, v_a = xx * f.x * f.x + xy * f.x * f.y + yy * f.y * f.y, v_q = -(xz * f.x + yz * f.y);
  // The derivatives of s, A and q by x are these numbers times x; those by y alike.
  const T along = v_s * f.a + v_a * T(2) * f.d - v_q * T(2) * f.q * f.q;
  const T v_x = f.a * (xx * T(2) * f.x + xy * f.y) - xz * f.q + along * f.x;
  const T v_y = f.a * (yy * T(2) * f.y + xy * f.x) - yz * f.q + along * f.y;
  const T v_z = f.q * (T(2) * f.q * (v_a - v_q * f.z) - v_s);
  const T inv2 = f.inv_scale * f.inv_scale;
  v_pc[0] += v_x * inv2;
  v_pc[1] += v_y * inv2;
  v_pc[2] += v_z * inv2;
}

// 3.1, 3.3, 3.9, 3.10  The pixel of a camera point and the affine map around it, of any model.
template <bool PINHOLE, class T, class S>
SPLAT_HD_FORCED Affine<T> project_point(const View<S>& view, const T* pc, T* mean2d) {
  if (PINHOLE) {
    const Affine<T> m = affine_map(view, pc);
    camera_to_image(view, pc, m.inv_z, mean2d);
    return m;
  }
  const PixelMap<T> p = view.model == kOrtho ? ortho_map(view, pc) : fisheye_map(view, pc);
  Affine<T> m = {};
  for (int k = 0; k < 2; ++k) mean2d[k] = p.mean2d[k];
  for (int k = 0; k < 3; ++k) {
    m.row0[k] = p.j[0] * T(view.rotation[k]) + p.j[1] * T(view.rotation[3 + k]) + p.j[2] * T(view.rotation[6 + k]);
    m.row1[k] = p.j[3] * T(view.rotation[k]) + p.j[4] * T(view.rotation[3 + k]) + p.j[5] * T(view.rotation[6 + k]);
  }
  return m;
}
template <bool PINHOLE, class T, class S>
SPLAT_HD_FORCED void project_point_vjp(const View<S>& view, const T* pc, const Affine<T>& m, const T* v_row0,
                                       const T* v_row1, const T* v_mean2d, T* v_pc, ViewGrad<T>* v_view) {
  if (PINHOLE) {
    affine_map_vjp(view, pc, m, v_row0, v_row1, v_pc, v_view);
    camera_to_image_vjp(view, pc, m.inv_z, v_mean2d, v_pc);
    return;
  }
  const PixelMap<T> p = view.model == kOrtho ? ortho_map(view, pc) : fisheye_map(view, pc);
  T v_j[6];
  for (int k = 0; k < 3; ++k) {
    const T w[3] = {T(view.rotation[3 * k]), T(view.rotation[3 * k + 1]), T(view.rotation[3 * k + 2])};
    v_j[k] = dot3(v_row0, w), v_j[3 + k] = dot3(v_row1, w);
    v_pc[k] += v_mean2d[0] * p.j[k] + v_mean2d[1] * p.j[3 + k];
  }
  if (view.model != kOrtho) fisheye_map_vjp(view, pc, v_j, v_pc);
  if (v_view == nullptr) return;
  for (int i = 0; i < 3; ++i)
    for (int k = 0; k < 3; ++k) v_view->rotation[3 * i + k] += p.j[i] * v_row0[k] + p.j[3 + i] * v_row1[k];
}

// 3.4  Image covariance U U^T + blur, U = (J R_w) M, and the compensation factor of the blur.
// Both determinants come without cancellation: det(U U^T) = |u0 x u1|^2.
template <class T>
struct Covariance2d {
  T u0[3], u1[3];
  T raw_a, raw_c;  // diagonal before the blur
  T a, b, c;       // blurred: [[a, b], [b, c]]
  T det;           // of the blurred matrix
  T compensation;  // sqrt(det raw / det blurred)
};
template <class T>
SPLAT_HD Covariance2d<T> covariance2d(const T* row0, const T* row1, const T* root) {
  Covariance2d<T> s;
  for (int k = 0; k < 3; ++k) {
    s.u0[k] = row0[0] * root[k] + row0[1] * root[3 + k] + row0[2] * root[6 + k];
    s.u1[k] = row1[0] * root[k] + row1[1] * root[3 + k] + row1[2] * root[6 + k];
  }
  const T cross[3] = {s.u0[1] * s.u1[2] - s.u0[2] * s.u1[1], s.u0[2] * s.u1[0] - s.u0[0] * s.u1[2],
                      s.u0[0] * s.u1[1] - s.u0[1] * s.u1[0]};
  const T raw_det = dot3(cross, cross);
  s.raw_a = dot3(s.u0, s.u0), s.raw_c = dot3(s.u1, s.u1);
  s.a = s.raw_a + T(kBlur);
  s.b = dot3(s.u0, s.u1);
  s.c = s.raw_c + T(kBlur);
  s.det = raw_det + T(kBlur) * (s.raw_a + s.raw_c) + T(kBlur * kBlur);
  s.compensation = sqrt_(raw_det / s.det);
  return s;
}
template <class T>
SPLAT_HD void covariance2d_vjp(const T* row0, const T* row1, const T* root, const Covariance2d<T>& s, T v_a, T v_b,
                               T v_c, T v_compensation, T* v_row0, T* v_row1, T* v_root) {
  // r = det raw / det blurred; a degenerate ellipse (r = 0) has no gradient through it.
  const T r = s.compensation * s.compensation;
  const T v_r = select(s.compensation > T(0), v_compensation * T(0.5) / s.compensation, T(0)) / s.det;
  v_a += v_r * (s.raw_c - r * s.c);
  v_b += v_r * T(2) * s.b * (r - T(1));
  v_c += v_r * (s.raw_a - r * s.a);
  T v_u0[3], v_u1[3];
  for (int k = 0; k < 3; ++k) {
    v_u0[k] = T(2) * v_a * s.u0[k] + v_b * s.u1[k];
    v_u1[k] = T(2) * v_c * s.u1[k] + v_b * s.u0[k];
  }
  for (int i = 0; i < 3; ++i) {
    v_row0[i] += dot3(v_u0, root + 3 * i);
    v_row1[i] += dot3(v_u1, root + 3 * i);
    for (int k = 0; k < 3; ++k) v_root[3 * i + k] += row0[i] * v_u0[k] + row1[i] * v_u1[k];
  }
}

// 3.5  The inverse of the image covariance, [[A, B], [B, C]].
template <class T>
struct Conic {
  T a, b, c;
};
template <class T>
SPLAT_HD Conic<T> conic(const Covariance2d<T>& s) {
  const T inv = T(1) / s.det;
  return {s.c * inv, -s.b * inv, s.a * inv};
}
template <class T>
SPLAT_HD void conic_vjp(const Conic<T>& q, T v_qa, T v_qb, T v_qc, T& v_a, T& v_b, T& v_c) {
  const T half = T(0.5) * v_qb;  // b stands twice in the matrix
  const T m00 = q.a * v_qa + q.b * half, m01 = q.a * half + q.b * v_qc;
  const T m10 = q.b * v_qa + q.c * half, m11 = q.b * half + q.c * v_qc;
  v_a -= m00 * q.a + m01 * q.b;
  v_b -= T(2) * (m00 * q.b + m01 * q.c);
  v_c -= m10 * q.b + m11 * q.c;
}

}  // namespace splat
