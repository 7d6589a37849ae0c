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
constexpr int kRowsAtOnce = 2;  // of the filter along y: neighbours share ten of their eleven rows
constexpr int kRingRows = kTaps + kRowsAtOnce - 1;
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
  // The filter along y takes kRowsAtOnce rows when the last row that it needs is there: row `last`.
  bool rows_end_at(int last) const {
    const int y = last - kSsimRadius;
    return y >= y0 && ((y - y0 + 1) % kRowsAtOnce == 0 || y + 1 == y1);
  }
  int rows_until(int last) const { return (last - kSsimRadius - y0) % kRowsAtOnce + 1; }
  int first_row(int last) const { return last - kSsimRadius - rows_until(last) + 1; }
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
  static_assert(kReach <= kLanes);
  static constexpr int kInput = kStripWidth + 2 * kLanes;  // the strip begins after sixteen numbers
  alignas(64) Real input[N][kInput];
  alignas(64) Real rows[kRingRows][N][kStripWidth];

  static int slot(int y) { return (y + kRingRows) % kRingRows; }
  void clear_row(int y) { std::fill(&rows[slot(y)][0][0], &rows[slot(y)][0][0] + N * kStripWidth, Real(0)); }
  // Filters the inputs along x into row y.
  void filter_row(int y) {
    auto& row = rows[slot(y)];
    for (int n = 0; n < N; ++n) {
      Neighbours<Real> at(input[n]);
      for (int c = 0; c < kStripWidth; c += kLanes) {
        at.advance();
        F sum = at.template shifted<0>() * F(ssim_tap(0));
        add_tap<1>(at, sum), add_tap<2>(at, sum), add_tap<3>(at, sum), add_tap<4>(at, sum), add_tap<5>(at, sum);
        sum.store(row[n] + c);
      }
    }
  }
  template <int k>
  static SPLAT_INLINE void add_tap(const Neighbours<Real>& at, F& sum) {
    sum += (at.template shifted<-kChannels * k>() + at.template shifted<kChannels * k>()) * F(ssim_tap(k));
  }
  // Where the rows around rows y and y + 1 lie, top to bottom.
  struct Window {
    const Real* rows[kRingRows];
  };
  SPLAT_INLINE Window window(int y) const {
    Window w;
    for (int k = 0; k < kRingRows; ++k) w.rows[k] = rows[slot(y - kSsimRadius + k)][0];
    return w;
  }
  // Quantity n filtered both ways, at sixteen numbers from column c on, of rows y and y + 1.
  static SPLAT_INLINE void filtered(const Window& w, int n, int c, F out[kRowsAtOnce]) {
    const int at = n * kStripWidth + c;
    F row[kRingRows];
    for (int k = 0; k < kRingRows; ++k) row[k] = F::load(w.rows[k] + at);
    for (int r = 0; r < kRowsAtOnce; ++r) {
      F sum = row[r + kSsimRadius] * F(ssim_tap(0));
      for (int k = 1; k <= kSsimRadius; ++k)
        sum += (row[r + kSsimRadius - k] + row[r + kSsimRadius + k]) * F(ssim_tap(k));
      out[r] = sum;
    }
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
  F first_targets(int64_t i, int count) const {
    Real t[kLanes] = {};
    for (int k = 0; k < count; ++k) t[k] = target_number(i + k);
    return F::load(t);
  }
  Real target_number(int64_t i) const {
    return loss.target_is_u8 ? Real(static_cast<const uint8_t*>(loss.target)[i]) * Real(1.0 / 255.0)
                             : static_cast<const Real*>(loss.target)[i];
  }
  // By the stack's rows.
  const Real* image_row(int64_t row) const { return static_cast<const Real*>(loss.image) + row * strips.width; }
  Real* map_row(int map, int64_t row) const { return maps + map * strips.map_size() + row * strips.stride; }

  // Columns [begin, end) of the image that the filter sees; the strip's input buffer starts at column `first`.
  struct Columns {
    int first, begin, end;
    Columns(const Strips& s, int strip)
        : first(strip * kStripWidth - kLanes), begin(std::max(0, strip * kStripWidth - kReach)),
          end(std::min(s.width, (strip + 1) * kStripWidth + kReach)) {}
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
    for (int i = 0; i < Ring<Real, kMoments, kChannels>::kInput; i += kLanes) {
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
      if (y < 0 || y >= strips.height) {
        ring.clear_row(y);
      } else {
        load_images(ring, columns, strip.image_row + y);
        if (y >= strip.y0 && y < strip.y1) sum_l1 += l1_row(ring, strip.inside);
        ring.filter_row(y);
      }
      if (strip.rows_end_at(y)) sum_ssim = ssim_rows<kGradient>(ring, strip, y, sum_ssim);
    }
    partials[2 * job] = sum_l1;
    partials[2 * job + 1] = sum_ssim;
  }

  double l1_row(const Ring<Real, kMoments, kChannels>& ring, int inside) const {
    F total = F(0);
    Real rest = 0;
    int c = 0;
    for (; c + kLanes <= inside; c += kLanes)
      total += abs_(F::load(ring.input[0] + kLanes + c) - F::load(ring.input[1] + kLanes + c));
    for (; c < inside; ++c) rest += splat::abs_(ring.input[0][kLanes + c] - ring.input[1][kLanes + c]);
    return double(sum(total)) + double(rest);
  }

  // The rows whose windows end in row `last`, one after the other; returns `sum_ssim` with theirs added.
  template <bool kGradient>
  double ssim_rows(const Ring<Real, kMoments, kChannels>& ring, const Strip& strip, int last, double sum_ssim) const {
    const int y = strip.first_row(last), count = strip.rows_until(last);
    const auto window = ring.window(y);
    const int64_t row = strip.image_row + y;
    const int c0 = strip.c0;
    // Columns of the strip whose windows count; elsewhere the maps are 0.
    const int border = loss.border * kChannels;
    const int first = std::min(std::max(0, border - c0), strip.inside);
    const int limit = std::max(first, std::min(strip.inside, strips.width - border - c0));
    const auto counts = [&](int r) {
      return r < count && y + r >= loss.border && y + r < strips.height - loss.border;
    };
    F total[kRowsAtOnce];
    double rest[kRowsAtOnce] = {};
    for (F& t : total) t = F(0);
    for (int c = first / kLanes * kLanes; c < limit; c += kLanes) {
      F f[kMoments][kRowsAtOnce];
      for (int n = 0; n < kMoments; ++n) ring.filtered(window, n, c, f[n]);
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (!counts(r)) continue;
        F derivative[kMaps];
        const F squares = (f[2][r] + f[3][r]) * F(0.5), xy = (f[2][r] - f[3][r]) * F(0.25);
        const F ssim = ssim_pixel_vjp(f[0][r], f[1][r], squares, xy, &derivative[0], &derivative[1], &derivative[2]);
        if constexpr (kGradient)
          for (int m = 0; m < kMaps; ++m) derivative[m].store(map_row(m, row + r) + c0 + c);
        if (loss.mask == nullptr && c >= first && c + kLanes <= limit) {
          total[r] += ssim;
          continue;
        }
        const uint8_t* mask = loss.mask == nullptr ? nullptr : loss.mask + (row + r) * loss.width;
        Real lanes[kLanes];
        ssim.store(lanes);
        for (int k = std::max(0, first - c); k < std::min(kLanes, limit - c); ++k)
          if (mask == nullptr || mask[(c0 + c + k) / kChannels] == 0) rest[r] += double(lanes[k]);
      }
    }
    for (int r = 0; r < count; ++r) {
      for (int m = 0; kGradient && m < kMaps; ++m) {
        Real* map = map_row(m, row + r) + c0;
        std::fill(map, map + (counts(r) ? first : kStripWidth), Real(0));
        std::fill(map + limit, map + kStripWidth, Real(0));
      }
      sum_ssim += double(sum(total[r])) + rest[r];
    }
    return sum_ssim;
  }

  void gradient(int64_t job) const {
    const Strip strip(strips, job);
    const Columns columns(strips, strip.number);
    Ring<Real, kMaps, kChannels> ring = {};
    for (int y = strip.y0 - kSsimRadius; y < strip.y1 + kSsimRadius; ++y) {
      if (y < 0 || y >= strips.height) {
        ring.clear_row(y);
      } else {
        for (int m = 0; m < kMaps; ++m) {
          const Real* row = map_row(m, strip.image_row + y);
          std::copy(row + columns.begin, row + columns.end, ring.input[m] + (columns.begin - columns.first));
        }
        ring.filter_row(y);
      }
      if (strip.rows_end_at(y)) gradient_rows(ring, strip, y);
    }
  }

  void gradient_rows(const Ring<Real, kMaps, kChannels>& ring, const Strip& strip, int last) const {
    const int y = strip.first_row(last), count = strip.rows_until(last);
    const auto window = ring.window(y);
    const F l1_scale = F((1.0 - loss.ssim_lambda) / numbers_within(loss, 0));
    const F ssim_scale = F(-loss.ssim_lambda / numbers_within(loss, loss.border));
    const int64_t offset = (strip.image_row + y) * strips.width + strip.c0;
    const int inside = strip.inside;
    const Real* image = static_cast<const Real*>(loss.image) + offset;
    Real* v_image = static_cast<Real*>(loss.v_image) + offset;
    for (int c = 0; c < inside; c += kLanes) {
      F f[kMaps][kRowsAtOnce];
      for (int m = 0; m < kMaps; ++m) ring.filtered(window, m, c, f[m]);
      const int numbers = std::min(kLanes, inside - c);
      for (int r = 0; r < count; ++r) {
        const int64_t at = int64_t(r) * strips.width + c;
        const bool all = numbers == kLanes;
        const F x = all ? F::load(image + at) : load_first(image + at, numbers);
        const F t = all ? target(offset + at) : first_targets(offset + at, numbers);
        const F ssim = f[0][r] + F(2) * x * f[1][r] + t * f[2][r];
        const F sign = select(x > t, F(1), select(x < t, F(-1), F(0)));
        const F v = sign * l1_scale + ssim * ssim_scale;
        all ? v.store(v_image + at) : store_first(v, v_image + at, numbers);
      }
    }
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
