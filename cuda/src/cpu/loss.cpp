// L1 + SSIM and its gradient in two sweeps, channels interleaved as they lie in the image. docs/math.md 7.
//
// Rows run through a ring of eleven filtered rows, strip by strip, so that everything stays in the first-level cache:
// the first sweep filters x, y, (x + y)^2 and (x - y)^2, which hold all that SSIM asks of x^2, y^2 and xy, and writes
// three derivative maps; the second filters these.
#include <algorithm>

#include "../../math/ssim.h"
#include "lanes.h"
#include "pool.h"
#include "stages.h"

namespace splat {
namespace {

constexpr int kChannels = 3;
constexpr int kReach = kChannels * kSsimRadius;  // numbers to either side that a filter sees
constexpr int kTaps = 2 * kSsimRadius + 1;
constexpr int kStripWidth = 96;  // numbers; a multiple of the lanes
constexpr int kStripRows = 64;
constexpr int kMoments = 4;
constexpr int kMaps = 3;  // derivatives by the filtered x, x^2 and xy

struct Strips {
  int width, height;  // numbers a row, rows
  int across, down, stride;
  explicit Strips(const SplatLoss& loss)
      : width(kChannels * loss.width), height(loss.height), across((width + kStripWidth - 1) / kStripWidth),
        down((height + kStripRows - 1) / kStripRows), stride(across * kStripWidth) {}
  int64_t jobs() const { return int64_t(across) * down; }
  int64_t map_size() const { return int64_t(stride) * height; }
};

// Rows of `N` quantities, filtered along x, waiting to be filtered along y.
template <class Real, int N>
struct Ring {
  using F = Lanes<Real, kLanes>;
  alignas(64) Real input[N][kStripWidth + 2 * kReach + kLanes];
  alignas(64) Real rows[kTaps][N][kStripWidth];

  void clear_row(int slot) { std::fill(&rows[slot][0][0], &rows[slot][0][0] + N * kStripWidth, Real(0)); }
  // Filters the inputs along x into a row.
  void filter_row(int slot) {
    for (int n = 0; n < N; ++n) {
      for (int c = 0; c < kStripWidth; c += kLanes) {
        const Real* at = input[n] + kReach + c;
        F sum = F::load(at) * F(ssim_tap(0));
        for (int k = 1; k <= kSsimRadius; ++k)
          sum += (F::load(at - kChannels * k) + F::load(at + kChannels * k)) * F(ssim_tap(k));
        sum.store(rows[slot][n] + c);
      }
    }
  }
  // Where the eleven rows around the one in `slot` lie, top to bottom.
  struct Window {
    const Real* rows[kTaps];
  };
  SPLAT_INLINE Window window(int slot) const {
    Window w;
    for (int k = 0; k < kTaps; ++k) w.rows[k] = rows[(slot + k + kTaps - kSsimRadius) % kTaps][0];
    return w;
  }
  // Quantity n filtered both ways, at sixteen numbers from column c on.
  static SPLAT_INLINE F filtered(const Window& w, int n, int c) {
    const int at = n * kStripWidth + c;
    F sum = F::load(w.rows[kSsimRadius] + at) * F(ssim_tap(0));
    for (int k = 1; k <= kSsimRadius; ++k)
      sum += (F::load(w.rows[kSsimRadius - k] + at) + F::load(w.rows[kSsimRadius + k] + at)) * F(ssim_tap(k));
    return sum;
  }
};

template <class Real>
struct LossSweeps {
  using F = Lanes<Real, kLanes>;
  const SplatLoss& loss;
  const Strips strips;
  Real* maps;        // [kMaps, height, stride], zero beyond the image's width
  double* partials;  // [jobs, 2] sums of |x - y| and of SSIM

  // Sixteen numbers of the target from `i` on, all of them inside it.
  SPLAT_INLINE F target(int64_t i) const {
    return loss.target_is_u8 ? load_bytes<Real>(static_cast<const uint8_t*>(loss.target) + i) * F(1.0 / 255.0)
                             : F::load(static_cast<const Real*>(loss.target) + i);
  }
  Real target_number(int64_t i) const {
    return loss.target_is_u8 ? Real(static_cast<const uint8_t*>(loss.target)[i]) * Real(1.0 / 255.0)
                             : static_cast<const Real*>(loss.target)[i];
  }
  const Real* image_row(int y) const { return static_cast<const Real*>(loss.image) + int64_t(y) * strips.width; }
  Real* map_row(int map, int y) const { return maps + map * strips.map_size() + int64_t(y) * strips.stride; }

  // Columns [begin, end) of the image that the strip's input buffer, which starts kReach to its left, can take.
  struct Columns {
    int first, begin, end;
    Columns(const Strips& s, int strip)
        : first(strip * kStripWidth - kReach), begin(std::max(0, first)),
          end(std::min(s.width, first + kStripWidth + 2 * kReach)) {}
  };

  void load_images(Ring<Real, kMoments>& ring, const Columns& columns, int y) const {
    const Real* row = image_row(y);
    const int64_t offset = int64_t(y) * strips.width;
    Real* x = ring.input[0] - columns.first;
    Real* t = ring.input[1] - columns.first;
    int c = columns.begin;
    for (; c + kLanes <= columns.end; c += kLanes) {
      F::load(row + c).store(x + c);
      target(offset + c).store(t + c);
    }
    for (; c < columns.end; ++c) x[c] = row[c], t[c] = target_number(offset + c);
    for (int i = 0; i < kStripWidth + 2 * kReach; i += kLanes) {
      const F a = F::load(ring.input[0] + i), b = F::load(ring.input[1] + i);
      square(a + b).store(ring.input[2] + i);
      square(a - b).store(ring.input[3] + i);
    }
  }

  void statistics(int64_t job) const {
    const int strip = int(job % strips.across), y0 = int(job / strips.across) * kStripRows;
    const int y1 = std::min(strips.height, y0 + kStripRows);
    const Columns columns(strips, strip);
    const int c0 = strip * kStripWidth, inside = std::min(kStripWidth, strips.width - c0);
    Ring<Real, kMoments> ring = {};
    double sum_l1 = 0, sum_ssim = 0;
    for (int y = y0 - kSsimRadius; y < y1 + kSsimRadius; ++y) {
      const int slot = (y + kTaps) % kTaps;
      if (y < 0 || y >= strips.height) {
        ring.clear_row(slot);
      } else {
        load_images(ring, columns, y);
        if (y >= y0 && y < y1) sum_l1 += l1_row(ring, inside);
        ring.filter_row(slot);
      }
      if (y - kSsimRadius >= y0) sum_ssim += ssim_row(ring, y - kSsimRadius, c0, inside);
    }
    partials[2 * job] = sum_l1;
    partials[2 * job + 1] = sum_ssim;
  }

  double l1_row(const Ring<Real, kMoments>& ring, int inside) const {
    F total = F(0);
    Real rest = 0;
    int c = 0;
    for (; c + kLanes <= inside; c += kLanes)
      total += abs_(F::load(ring.input[0] + kReach + c) - F::load(ring.input[1] + kReach + c));
    for (; c < inside; ++c) rest += splat::abs_(ring.input[0][kReach + c] - ring.input[1][kReach + c]);
    return double(sum(total)) + double(rest);
  }

  double ssim_row(const Ring<Real, kMoments>& ring, int y, int c0, int inside) const {
    const auto window = ring.window((y + kTaps) % kTaps);
    F total = F(0);
    double rest = 0;
    for (int c = 0; c < inside; c += kLanes) {
      F derivative[kMaps];
      F f[kMoments];
      for (int n = 0; n < kMoments; ++n) f[n] = ring.filtered(window, n, c);
      const F squares = (f[2] + f[3]) * F(0.5), xy = (f[2] - f[3]) * F(0.25);
      const F ssim = ssim_pixel_vjp(f[0], f[1], squares, xy, &derivative[0], &derivative[1], &derivative[2]);
      for (int m = 0; m < kMaps; ++m) derivative[m].store(map_row(m, y) + c0 + c);
      if (c + kLanes <= inside) {
        total += ssim;
        continue;
      }
      Real lanes[kLanes];
      ssim.store(lanes);
      for (int k = 0; k < inside - c; ++k) rest += double(lanes[k]);
    }
    // What lies beyond the image is no window's centre.
    for (int m = 0; m < kMaps; ++m) std::fill(map_row(m, y) + c0 + inside, map_row(m, y) + c0 + kStripWidth, Real(0));
    return double(sum(total)) + rest;
  }

  void gradient(int64_t job) const {
    const int strip = int(job % strips.across), y0 = int(job / strips.across) * kStripRows;
    const int y1 = std::min(strips.height, y0 + kStripRows);
    const Columns columns(strips, strip);
    const int c0 = strip * kStripWidth, inside = std::min(kStripWidth, strips.width - c0);
    Ring<Real, kMaps> ring = {};
    for (int y = y0 - kSsimRadius; y < y1 + kSsimRadius; ++y) {
      const int slot = (y + kTaps) % kTaps;
      if (y < 0 || y >= strips.height) {
        ring.clear_row(slot);
      } else {
        for (int m = 0; m < kMaps; ++m) {
          const Real* row = map_row(m, y);
          std::copy(row + columns.begin, row + columns.end, ring.input[m] + (columns.begin - columns.first));
        }
        ring.filter_row(slot);
      }
      if (y - kSsimRadius >= y0) gradient_row(ring, y - kSsimRadius, c0, inside);
    }
  }

  void gradient_row(const Ring<Real, kMaps>& ring, int y, int c0, int inside) const {
    const auto window = ring.window((y + kTaps) % kTaps);
    const double count = double(strips.width) * strips.height;
    const F l1_scale = F((1.0 - loss.ssim_lambda) / count), ssim_scale = F(-loss.ssim_lambda / count);
    const int64_t offset = int64_t(y) * strips.width + c0;
    const Real* image = static_cast<const Real*>(loss.image) + offset;
    Real* v_image = static_cast<Real*>(loss.v_image) + offset;
    const auto sixteen = [&](F x, F t, int c) {
      const F ssim = ring.filtered(window, 0, c) + F(2) * x * ring.filtered(window, 1, c) +
                     t * ring.filtered(window, 2, c);
      const F sign = select(x > t, F(1), select(x < t, F(-1), F(0)));
      return sign * l1_scale + ssim * ssim_scale;
    };
    int c = 0;
    for (; c + kLanes <= inside; c += kLanes) sixteen(F::load(image + c), target(offset + c), c).store(v_image + c);
    if (c == inside) return;
    Real t[kLanes] = {};
    for (int k = 0; k < inside - c; ++k) t[k] = target_number(offset + c + k);
    store_first(sixteen(load_first(image + c, inside - c), F::load(t), c), v_image + c, inside - c);
  }
};

}  // namespace

template <class Real>
int64_t Stages<Real>::loss_bytes(const SplatLoss& loss) {
  const Strips strips(loss);
  return kMaps * strips.map_size() * int64_t(sizeof(Real)) + 2 * strips.jobs() * int64_t(sizeof(double)) + 64;
}

template <class Real>
void Stages<Real>::loss(const SplatCall& call, SplatLoss& loss) {
  const Strips strips(loss);
  double* partials = static_cast<double*>(loss.workspace);
  Real* maps = reinterpret_cast<Real*>(partials + 2 * strips.jobs());
  const LossSweeps<Real> sweeps{loss, strips, maps, partials};
  parallel_for(call.threads, strips.jobs(), [&](int64_t job) { sweeps.statistics(job); });
  loss.l1 = loss.ssim = 0;
  for (int64_t job = 0; job < strips.jobs(); ++job) loss.l1 += partials[2 * job], loss.ssim += partials[2 * job + 1];
  const double count = double(strips.width) * strips.height;
  loss.l1 /= count, loss.ssim /= count;
  if (loss.v_image != nullptr) parallel_for(call.threads, strips.jobs(), [&](int64_t job) { sweeps.gradient(job); });
}

#define SPLAT_INSTANTIATE(Real)                                    \
  template int64_t Stages<Real>::loss_bytes(const SplatLoss&);     \
  template void Stages<Real>::loss(const SplatCall&, SplatLoss&);
SPLAT_INSTANTIATE(float)
#ifdef SPLAT_WITH_DOUBLE
SPLAT_INSTANTIATE(double)
#endif

}  // namespace splat
