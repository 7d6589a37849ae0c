// L1 + SSIM and its gradient in two sweeps, channels interleaved as they lie in an image. docs/math.md 7.
// Images of a stack lie one below the other, and each has strips of its own.
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

constexpr int kTaps = 2 * kSsimRadius + 1;
constexpr int kStripWidth = 96;  // numbers; a multiple of the lanes
constexpr int kStripRows = 64;
constexpr int kMoments = 4;
constexpr int kMaps = 3;  // derivatives by the filtered x, x^2 and xy

struct Strips {
  int width, height;  // numbers a row, rows of an image
  int across, down, stride, images;
  explicit Strips(const SplatLoss& loss)
      : width(loss.channels * loss.width), height(loss.height), across((width + kStripWidth - 1) / kStripWidth),
        down((height + kStripRows - 1) / kStripRows), stride(across * kStripWidth), images(loss.images) {}
  int64_t jobs() const { return int64_t(across) * down * images; }
  int64_t map_size() const { return int64_t(stride) * height * images; }
};

// One strip of one image.
struct Strip {
  int64_t image_row;  // the stack's row where its image begins
  int number;         // of those side by side
  int y0, y1, c0;
  int inside;         // columns of it that are in the image
  Strip(const Strips& s, int64_t job)
      : image_row(job / (int64_t(s.across) * s.down) * s.height), number(int(job % s.across)),
        y0(int(job / s.across % s.down) * kStripRows), y1(std::min(s.height, y0 + kStripRows)),
        c0(number * kStripWidth), inside(std::min(kStripWidth, s.width - c0)) {}
};

double numbers_within(const SplatLoss& loss, int border) {
  return splat::numbers_within(loss.width, loss.height, loss.channels, loss.images, border);
}

// Numbers whose SSIM counts.
double numbers_of_ssim(const SplatLoss& loss) {
  if (loss.mask == nullptr) return numbers_within(loss, loss.border);
  int64_t pixels = 0;
  for (int64_t row = 0; row < int64_t(loss.images) * loss.height; ++row) {
    const int64_t y = row % loss.height;
    if (y < loss.border || y >= loss.height - loss.border) continue;
    const uint8_t* mask = loss.mask + row * loss.width;
    pixels += std::count(mask + loss.border, mask + loss.width - loss.border, uint8_t(0));
  }
  return double(pixels) * loss.channels;
}

// Rows of `N` quantities, filtered along x, waiting to be filtered along y.
template <class Real, int N, int kChannels>
struct Ring {
  using F = Lanes<Real, kLanes>;
  static constexpr int kReach = kChannels * kSsimRadius;  // numbers to either side that a filter sees
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

template <class Real, int kChannels>
struct LossSweeps {
  using F = Lanes<Real, kLanes>;
  static constexpr int kReach = kChannels * kSsimRadius;
  const SplatLoss& loss;
  const Strips strips;
  Real* maps;        // [kMaps, images, height, stride], zero beyond the image's width and where SSIM does not count;
                     // only with a gradient
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
  // By the stack's rows.
  const Real* image_row(int64_t row) const { return static_cast<const Real*>(loss.image) + row * strips.width; }
  Real* map_row(int map, int64_t row) const { return maps + map * strips.map_size() + row * strips.stride; }

  // Columns [begin, end) of the image that the strip's input buffer, which starts kReach to its left, can take.
  struct Columns {
    int first, begin, end;
    Columns(const Strips& s, int strip)
        : first(strip * kStripWidth - kReach), begin(std::max(0, first)),
          end(std::min(s.width, first + kStripWidth + 2 * kReach)) {}
  };

  void load_images(Ring<Real, kMoments, kChannels>& ring, const Columns& columns, int64_t stack_row) const {
    const Real* row = image_row(stack_row);
    const int64_t offset = stack_row * strips.width;
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

  // kGradient: write the derivative maps too.
  template <bool kGradient>
  void statistics(int64_t job) const {
    const Strip strip(strips, job);
    const Columns columns(strips, strip.number);
    Ring<Real, kMoments, kChannels> ring = {};
    double sum_l1 = 0, sum_ssim = 0;
    for (int y = strip.y0 - kSsimRadius; y < strip.y1 + kSsimRadius; ++y) {
      const int slot = (y + kTaps) % kTaps;
      if (y < 0 || y >= strips.height) {
        ring.clear_row(slot);
      } else {
        load_images(ring, columns, strip.image_row + y);
        if (y >= strip.y0 && y < strip.y1) sum_l1 += l1_row(ring, strip.inside);
        ring.filter_row(slot);
      }
      if (y - kSsimRadius >= strip.y0) sum_ssim += ssim_row<kGradient>(ring, strip, y - kSsimRadius);
    }
    partials[2 * job] = sum_l1;
    partials[2 * job + 1] = sum_ssim;
  }

  double l1_row(const Ring<Real, kMoments, kChannels>& ring, int inside) const {
    F total = F(0);
    Real rest = 0;
    int c = 0;
    for (; c + kLanes <= inside; c += kLanes)
      total += abs_(F::load(ring.input[0] + kReach + c) - F::load(ring.input[1] + kReach + c));
    for (; c < inside; ++c) rest += splat::abs_(ring.input[0][kReach + c] - ring.input[1][kReach + c]);
    return double(sum(total)) + double(rest);
  }

  template <bool kGradient>
  double ssim_row(const Ring<Real, kMoments, kChannels>& ring, const Strip& strip, int y) const {
    const auto window = ring.window((y + kTaps) % kTaps);
    const int64_t row = strip.image_row + y;
    const int c0 = strip.c0;
    const uint8_t* mask = loss.mask == nullptr ? nullptr : loss.mask + row * loss.width;
    // Columns of the strip whose windows count; elsewhere the maps are 0.
    const int border = loss.border * kChannels;
    const bool counts = y >= loss.border && y < strips.height - loss.border;
    const int begin = counts ? std::min(std::max(0, border - c0), strip.inside) : strip.inside;
    const int end = std::max(begin, std::min(strip.inside, strips.width - border - c0));
    F total = F(0);
    double rest = 0;
    for (int c = begin / kLanes * kLanes; c < end; c += kLanes) {
      F derivative[kMaps];
      F f[kMoments];
      for (int n = 0; n < kMoments; ++n) f[n] = ring.filtered(window, n, c);
      const F squares = (f[2] + f[3]) * F(0.5), xy = (f[2] - f[3]) * F(0.25);
      const F ssim = ssim_pixel_vjp(f[0], f[1], squares, xy, &derivative[0], &derivative[1], &derivative[2]);
      if constexpr (kGradient)
        for (int m = 0; m < kMaps; ++m) derivative[m].store(map_row(m, row) + c0 + c);
      if (mask == nullptr && c >= begin && c + kLanes <= end) {
        total += ssim;
        continue;
      }
      Real lanes[kLanes];
      ssim.store(lanes);
      for (int k = std::max(0, begin - c); k < std::min(kLanes, end - c); ++k)
        if (mask == nullptr || mask[(c0 + c + k) / kChannels] == 0) rest += double(lanes[k]);
    }
    for (int m = 0; kGradient && m < kMaps; ++m) {
      Real* map = map_row(m, row) + c0;
      std::fill(map, map + begin, Real(0));
      std::fill(map + end, map + kStripWidth, Real(0));
    }
    return double(sum(total)) + rest;
  }

  void gradient(int64_t job) const {
    const Strip strip(strips, job);
    const Columns columns(strips, strip.number);
    Ring<Real, kMaps, kChannels> ring = {};
    for (int y = strip.y0 - kSsimRadius; y < strip.y1 + kSsimRadius; ++y) {
      const int slot = (y + kTaps) % kTaps;
      if (y < 0 || y >= strips.height) {
        ring.clear_row(slot);
      } else {
        for (int m = 0; m < kMaps; ++m) {
          const Real* row = map_row(m, strip.image_row + y);
          std::copy(row + columns.begin, row + columns.end, ring.input[m] + (columns.begin - columns.first));
        }
        ring.filter_row(slot);
      }
      if (y - kSsimRadius >= strip.y0) gradient_row(ring, strip, y - kSsimRadius);
    }
  }

  void gradient_row(const Ring<Real, kMaps, kChannels>& ring, const Strip& strip, int y) const {
    const auto window = ring.window((y + kTaps) % kTaps);
    const F l1_scale = F((1.0 - loss.ssim_lambda) / numbers_within(loss, 0));
    const F ssim_scale = F(-loss.ssim_lambda / numbers_within(loss, loss.border));
    const int64_t offset = (strip.image_row + y) * strips.width + strip.c0;
    const int inside = strip.inside;
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
  const auto run = [&](const auto& sweeps) {
    parallel_for(call.threads, strips.jobs(), [&](int64_t job) {
      loss.v_image != nullptr ? sweeps.template statistics<true>(job) : sweeps.template statistics<false>(job);
    });
    loss.l1 = loss.ssim = 0;
    for (int64_t job = 0; job < strips.jobs(); ++job)
      loss.l1 += partials[2 * job], loss.ssim += partials[2 * job + 1];
    loss.l1 /= numbers_within(loss, 0), loss.ssim /= numbers_of_ssim(loss);
    if (loss.v_image != nullptr) parallel_for(call.threads, strips.jobs(), [&](int64_t job) { sweeps.gradient(job); });
  };
  if (loss.channels == 1) run(LossSweeps<Real, 1>{loss, strips, maps, partials});
  else run(LossSweeps<Real, 3>{loss, strips, maps, partials});
}

#define SPLAT_INSTANTIATE(Real)                                    \
  template int64_t Stages<Real>::loss_bytes(const SplatLoss&);     \
  template void Stages<Real>::loss(const SplatCall&, SplatLoss&);
SPLAT_INSTANTIATE(float)
#ifdef SPLAT_WITH_DOUBLE
SPLAT_INSTANTIATE(double)
#endif

}  // namespace splat
