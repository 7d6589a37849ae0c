// Blending of any number of channels, forward and backward, one 16x16 tile a job. docs/math.md 6.
//
// alpha, transmittance and weights are made once for all channels, a 4x4 block and some intersections at a time. What is
// left is products of small matrices: the image is weights times colours, the gradients of the colours are weights times
// gradients of the image (both with channels as lanes), and dL/dweight is colours times gradients of the image (with
// pixels as lanes).
#include <vector>

#include "stages.h"
#include "tile.h"

namespace splat {
namespace {

// Rows of a matrix whose sums stay in registers; no result depends on it.
#if SPLAT_VECTOR_BYTES == 64
constexpr int kAtOnce = 8;
#elif SPLAT_VECTOR_BYTES == 32
constexpr int kAtOnce = 4;
#else
constexpr int kAtOnce = 2;
#endif

constexpr int kGroup = 32;  // intersections whose weights are kept, forward
constexpr int kBatch = 16;  // intersections whose gradients are summed together, backward

inline int64_t padded_channels(int64_t channels) { return (channels + kLanes - 1) / kLanes * kLanes; }

// Memory of a thread, kept from tile to tile; aligned to a cache line.
template <class Real>
Real* scratch(size_t numbers) {
  constexpr size_t kLine = 64;
  static thread_local std::vector<Real> memory;
  if (memory.size() < numbers + kLine) memory.resize(numbers + kLine);
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<Real*>((at + kLine - 1) / kLine * kLine);
}

// sums[r][c] += sum over k of factors[k of r] * rows[k][c], for `Rows` rows of sixteen channels from c on, in the order
// of k. factor(r, k) and row(k) give what is multiplied.
template <int Rows, class Real, class Sum, class Factor, class Row>
SPLAT_INLINE void add_products(int count, int64_t c, Sum sum, Factor factor, Row row) {
  using F = Lanes<Real, kLanes>;
  F total[Rows];
  for (int r = 0; r < Rows; ++r) total[r] = F::load(sum(r) + c);
  for (int k = 0; k < count; ++k) {
    const F one = F::load(row(k) + c);
    for (int r = 0; r < Rows; ++r) total[r] += F(factor(r, k)) * one;
  }
  for (int r = 0; r < Rows; ++r) total[r].store(sum(r) + c);
}

// ---- forward -----------------------------------------------------------------------------------------------------

template <class Real, bool Depth>
struct TileChannels {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatFrame& frame;
  const Real* background;
  const SplatImages& out;
  int64_t channels = frame.channels->count, padded = padded_channels(channels);

  // Weights of a group of intersections in a block, and the rows of their colours.
  struct Group {
    alignas(64) Real weights[kGroup][kLanes];
    const Real* rows[kGroup];
    Real* copies;  // [kGroup][padded], of rows that are no whole vectors
    Real* sums;    // [kLanes][padded]
    int count = 0;
  };

  void operator()(int64_t index) const {
    const Tile<Real> tile(view, frame, index);
    Group group;
    group.sums = scratch<Real>(size_t(kLanes + kGroup) * padded);
    group.copies = group.sums + kLanes * padded;
    std::fill(group.sums, group.copies + kGroup * padded, Real(0));
    alignas(64) Real transmittance[kPixels];
    tile.initial_transmittance(transmittance);
    int64_t end = tile.begin;
    for (int b = 0; b < kBlocksPerTile; ++b) end = std::max(end, blend_block(tile, b, transmittance, group));
    frame.tile_ends[index] = int32_t(end - tile.begin);
  }

  // As TileBlender's, channels apart.
  int64_t blend_block(const Tile<Real>& tile, int block, const Real* initial, Group& group) const {
    const F x = Tile<Real>::lane_x() + F(Real(tile.x0 + kBlock * (block % kBlock)));
    const F y = Tile<Real>::lane_y() + F(Real(tile.y0 + kBlock * (block / kBlock)));
    const Real* projected = static_cast<const Real*>(frame.projected);
    F decaying = F::load(initial + block * kLanes), transmittance = decaying, depth = 0;
    int64_t end = tile.begin;
    bool alive = any(decaying > F(0));
    if (!alive) return end;  // outside the image
    constexpr int kListed = 256;
    int32_t list[kListed + kLanes];
    for (int64_t base = tile.begin; base < tile.end && alive; base += kListed) {
      const int count = list_block(frame, base, std::min<int64_t>(kListed, tile.end - base), 1u << block, list);
      for (int i = 0; i < count; ++i) {
        const uint32_t slot = frame.isect_gaussians[base + list[i]];
        const Real* proj = projected + int64_t(slot) * kProjectedSize;
        if (i + kAhead < count) fetch(frame.isect_gaussians[base + list[i + kAhead]]);
        const F alpha = block_alpha(proj, x - F(proj[kProjX]), y - F(proj[kProjY]));
        const F weight = alpha * decaying;
        decaying -= weight;
        const auto live = decaying > F(kMinTransmittance);
        const F w = select_or_zero(live, weight);
        transmittance = select(live, decaying, transmittance);
        if constexpr (Depth) depth += w * F(proj[kProjDepth]);
        append(group, w, frame.ids[slot]);
        if (!any(live)) {
          end = base + list[i] + 1;
          alive = false;
          break;
        }
      }
    }
    if (alive) end = tile.end;
    add_group(group);
    write_block(tile, block, transmittance, depth, group.sums);
    return end;
  }

  SPLAT_INLINE void fetch(uint32_t slot) const {
    __builtin_prefetch(static_cast<const Real*>(frame.projected) + int64_t(slot) * kProjectedSize);
    const Real* row = static_cast<const Real*>(frame.channels->colors) + frame.ids[slot] * channels;
    for (int64_t c = 0; c < channels; c += 64 / int64_t(sizeof(Real))) __builtin_prefetch(row + c);
  }

  SPLAT_INLINE void append(Group& group, F weight, int32_t gaussian) const {
    const Real* row = static_cast<const Real*>(frame.channels->colors) + gaussian * channels;
    if (channels != padded) row = std::copy_n(row, channels, group.copies + group.count * padded) - channels;
    weight.store(group.weights[group.count]);
    group.rows[group.count] = row;
    if (++group.count == kGroup) add_group(group);
  }

  // Adds the group's weights times its colours to the block's pixels.
  void add_group(Group& group) const {
    for (int64_t c = 0; c < padded; c += kLanes)
      for (int pixel = 0; pixel < kLanes; pixel += kAtOnce)
        add_products<kAtOnce, Real>(
            group.count, c, [&](int r) { return group.sums + (pixel + r) * padded; },
            [&](int r, int k) { return group.weights[k][pixel + r]; }, [&](int k) { return group.rows[k]; });
    group.count = 0;
  }

  // Also clears the sums for the next block.
  void write_block(const Tile<Real>& tile, int block, F transmittance, F depth, Real* sums) const {
    Real t[kLanes], z[kLanes];
    transmittance.store(t);
    if constexpr (Depth) depth.store(z);
    for (int pixel = 0; pixel < kLanes; ++pixel) {
      Real* from = sums + pixel * padded;
      const int x = block % kBlock * kBlock + pixel % kBlock, y = block / kBlock * kBlock + pixel / kBlock;
      if (x < tile.width && y < tile.height) {
        const int64_t at = int64_t(tile.y0 + y) * view.width + tile.x0 + x;
        Real* image = static_cast<Real*>(out.image) + at * channels;
        for (int64_t c = 0; c < channels; ++c) image[c] = from[c] + t[pixel] * background[c];
        static_cast<Real*>(out.alpha)[at] = Real(1) - t[pixel];
        if constexpr (Depth) static_cast<Real*>(out.depth)[at] = z[pixel];
      }
      std::fill(from, from + padded, Real(0));
    }
  }
};

// ---- backward ----------------------------------------------------------------------------------------------------

// Front to back again, as TileBlenderVjp, for the channels [first, first + width) of the colours' gradients. Geometry: also
// the gradients of projected Gaussians, from all channels.
template <class Real, bool Geometry, bool Depth, bool Abs>
struct TileChannelsVjp {
  using F = Lanes<Real, kLanes>;
  const SplatView& view;
  const SplatFrame& frame;
  const SplatImages& out;
  const SplatImages& v_out;
  Real* background_partials;  // or null
  int64_t first, width;
  int64_t channels = frame.channels->count, padded = padded_channels(channels);
  static constexpr int kFields = isect_grad_fields(Depth, Abs);

  struct Buffers {
    struct Block {
      Real transmittance[kLanes], behind[kLanes], depth[kLanes], padding[kLanes];
    };
    alignas(64) Block blocks[kBlocksPerTile];
    alignas(64) Real weights[kBatch][kLanes], v_weights[kBatch][kLanes];
    alignas(64) Real sums[kBatch][kIsectGradUsed][kLanes];
    Real* by_pixel;    // [kPixels][padded] gradients of the image
    Real* by_channel;  // [kBlocksPerTile][padded][kLanes] the same
    Real* colors;      // [kBatch][padded channels of the pass] gradients of the batch's colours
  };

  void operator()(int64_t index) const {
    const Tile<Real> tile(view, frame, index);
    const int64_t wide = padded_channels(width);
    Buffers buffers;
    buffers.by_pixel = scratch<Real>(size_t(2 * kPixels) * padded + kBatch * wide);
    buffers.by_channel = buffers.by_pixel + kPixels * padded;
    buffers.colors = buffers.by_channel + kPixels * padded;
    read(tile, buffers, index);
    const int64_t stop = tile.begin + frame.tile_ends[index];
    uint32_t alive = (1u << kBlocksPerTile) - 1u;
    for (int64_t base = tile.begin; base < tile.end; base += kBatch) {
      const int count = int(std::min<int64_t>(kBatch, tile.end - base));
      std::fill(buffers.colors, buffers.colors + count * wide, Real(0));
      if constexpr (Geometry) std::fill(buffers.sums[0][0], buffers.sums[0][0] + count * kIsectGradUsed * kLanes, Real(0));
      int32_t list[kBatch + kLanes];
      const int64_t reached = std::min<int64_t>(count, stop - base);
      for (uint32_t left = reached > 0 ? alive : 0u; left != 0; left &= left - 1) {
        const int block = __builtin_ctz(left);
        const int listed = list_block(frame, base, reached, 1u << block, list);
        if (listed > 0 && !visit(tile, block, base, list, listed, buffers)) alive &= ~(1u << block);
      }
      write(base, count, buffers);
    }
  }

  // Adds the listed intersections' gradients in a block; whether any of its pixels goes on.
  bool visit(const Tile<Real>& tile, int block, int64_t base, const int32_t* list, int listed, Buffers& buffers) const {
    const F x = Tile<Real>::lane_x() + F(Real(tile.x0 + kBlock * (block % kBlock)));
    const F y = Tile<Real>::lane_y() + F(Real(tile.y0 + kBlock * (block / kBlock)));
    const Real* projected = static_cast<const Real*>(frame.projected);
    auto& at = buffers.blocks[block];
    if constexpr (Geometry) v_weights(block, base, list, listed, buffers);
    F before = F::load(at.transmittance), behind = F::load(at.behind);
    bool goes_on = true;
    for (int i = 0; i < listed; ++i) {
      const Real* proj = projected + int64_t(frame.isect_gaussians[base + list[i]]) * kProjectedSize;
      const F dx = x - F(proj[kProjX]), dy = y - F(proj[kProjY]);
      const F raw = unclamped_alpha(proj, dx, dy), alpha = min_(F(kMaxAlpha), raw);
      const F after = before - alpha * before;
      const auto live = after > F(kMinTransmittance);
      const F live_alpha = select_or_zero(live, alpha);
      const F w = live_alpha * before;
      w.store(buffers.weights[i]);
      if constexpr (Geometry) {
        F cg = F::load(buffers.v_weights[i]);
        if constexpr (Depth) cg += F(proj[kProjDepth]) * F::load(at.depth);
        behind = behind - w * cg;
        // No gradient reaches geometry or opacity where alpha was clamped.
        const F free_alpha = select_or_zero(raw <= F(kMaxAlpha), live_alpha);
        const F v = free_alpha * alpha_vjp(before, cg, behind, F(1) - alpha);
        const F vx = v * dx, vy = v * dy;
        const auto add = [&](int field, F term) {
          Real* sum = buffers.sums[list[i]][field];
          (F::load(sum) + term).store(sum);
        };
        add(kGradV, v), add(kGradVx, vx), add(kGradVy, vy);
        add(kGradVxx, vx * dx), add(kGradVxy, vx * dy), add(kGradVyy, vy * dy);
        if constexpr (Depth) add(kGradDepth, w * F::load(at.depth));
        if constexpr (Abs) {
          F abs_x, abs_y;
          abs_mean2d_grads(proj, vx, vy, abs_x, abs_y);
          add(kGradAbsX, abs_x), add(kGradAbsY, abs_y);
        }
      }
      before = after;
      if (!any(live)) {
        // The pixels have stopped for good.
        goes_on = false;
        listed = i + 1;
      }
    }
    before.store(at.transmittance), behind.store(at.behind);
    color_grads(block, list, listed, buffers);
    return goes_on;
  }

  // dL/dweight of each listed intersection and pixel: its colour times the gradient of the pixel.
  void v_weights(int block, int64_t base, const int32_t* list, int listed, Buffers& buffers) const {
    const Real* gradients = buffers.by_channel + block * padded * kLanes;
    const auto color = [&](int i) {
      return static_cast<const Real*>(frame.channels->colors) +
             frame.ids[frame.isect_gaussians[base + list[i]]] * channels;
    };
    int i = 0;
    for (; i + kAtOnce <= listed; i += kAtOnce) {
      const Real* colors[kAtOnce];
      F total[kAtOnce];
      for (int r = 0; r < kAtOnce; ++r) colors[r] = color(i + r), total[r] = F(0);
      for (int64_t c = 0; c < channels; ++c) {
        const F gradient = F::load(gradients + c * kLanes);
        for (int r = 0; r < kAtOnce; ++r) total[r] += F(colors[r][c]) * gradient;
      }
      for (int r = 0; r < kAtOnce; ++r) total[r].store(buffers.v_weights[i + r]);
    }
    for (; i < listed; ++i) {
      const Real* one = color(i);
      F total = 0;
      for (int64_t c = 0; c < channels; ++c) total += F(one[c]) * F::load(gradients + c * kLanes);
      total.store(buffers.v_weights[i]);
    }
  }

  // Adds weights times gradients of the block's pixels to the gradients of the listed intersections' colours.
  void color_grads(int block, const int32_t* list, int listed, Buffers& buffers) const {
    const int64_t wide = padded_channels(width);
    const Real* pixels = buffers.by_pixel + block * kLanes * padded + first;
    for (int64_t c = 0; c < wide; c += kLanes) {
      int i = 0;
      const auto sum = [&](int r) { return buffers.colors + list[i + r] * wide; };
      const auto factor = [&](int r, int k) { return buffers.weights[i + r][k]; };
      const auto row = [&](int k) { return pixels + k * padded; };
      for (; i + kAtOnce <= listed; i += kAtOnce) add_products<kAtOnce, Real>(kLanes, c, sum, factor, row);
      for (; i < listed; ++i) add_products<1, Real>(kLanes, c, sum, factor, row);
    }
  }

  void write(int64_t base, int count, const Buffers& buffers) const {
    const int64_t wide = padded_channels(width);
    for (int i = 0; i < count; ++i) {
      const int64_t row = frame.isect_grad_rows[base + i];
      if constexpr (Geometry) {
        F sums[kIsectGradUsed];
        for (int f = 0; f < kFields; ++f) sums[f] = F::load(buffers.sums[i][f]);
        sum_each<kFields>(sums, static_cast<Real*>(frame.isect_grads) + row * kIsectGradSize);
      }
      if (frame.channels->v_colors != nullptr)
        std::copy_n(buffers.colors + i * wide, width, static_cast<Real*>(frame.channels->isect_grads) + row * width);
    }
  }

  // The gradients of the image in both layouts, and their product with everything that was blended.
  void read(const Tile<Real>& tile, Buffers& buffers, int64_t index) const {
    alignas(64) Real transmittance[kPixels];
    tile.initial_transmittance(transmittance);
    Real left[kPixels] = {};
    for (int block = 0; block < kBlocksPerTile; ++block) {
      auto& at = buffers.blocks[block];
      std::copy_n(transmittance + block * kLanes, kLanes, at.transmittance);
      Real* rows = buffers.by_pixel + block * kLanes * padded;
      for (int pixel = 0; pixel < kLanes; ++pixel) {
        const int x = block % kBlock * kBlock + pixel % kBlock, y = block / kBlock * kBlock + pixel / kBlock;
        const bool inside = x < tile.width && y < tile.height;
        const int64_t place = int64_t(tile.y0 + y) * view.width + tile.x0 + x;
        at.behind[pixel] = at.depth[pixel] = 0;
        read_pixel(inside, place, rows + pixel * padded, at.behind[pixel], at.depth[pixel]);
        if (inside) left[block * kLanes + pixel] = Real(1) - static_cast<const Real*>(out.alpha)[place];
      }
      if constexpr (!Geometry) continue;
      for (int64_t c = 0; c < padded; c += kLanes) {
        F square[kLanes];
        for (int pixel = 0; pixel < kLanes; ++pixel) square[pixel] = F::load(rows + pixel * padded + c);
        transpose_16(square);
        for (int k = 0; k < kLanes; ++k) square[k].store(buffers.by_channel + (block * padded + c + k) * kLanes);
      }
    }
    if (background_partials == nullptr) return;
    Real* sums = buffers.colors;  // not in use yet
    for (int64_t c = 0; c < padded; c += kLanes) {
      std::fill(sums, sums + kLanes, Real(0));
      add_products<1, Real>(
          kPixels, 0, [&](int) { return sums; }, [&](int, int k) { return left[k]; },
          [&](int k) { return buffers.by_pixel + k * padded + c; });
      std::copy_n(sums, std::min<int64_t>(kLanes, channels - c), background_partials + index * channels + c);
    }
  }

  // Zeros outside the image.
  SPLAT_INLINE void read_pixel(bool inside, int64_t place, Real* row, Real& behind, Real& depth) const {
    std::fill(inside ? row + channels : row, row + padded, Real(0));
    if (!inside) return;
    std::copy_n(static_cast<const Real*>(v_out.image) + place * channels, channels, row);
    if constexpr (Geometry) {
      const Real* image = static_cast<const Real*>(out.image) + place * channels;
      F total = 0;
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int64_t more = channels - c;
        total += (more >= kLanes ? F::load(image + c) : load_first(image + c, int(more))) * F::load(row + c);
      }
      behind = sum(total);
      if (v_out.alpha != nullptr)
        behind -= (Real(1) - static_cast<const Real*>(out.alpha)[place]) * static_cast<const Real*>(v_out.alpha)[place];
      if constexpr (Depth) {
        depth = static_cast<const Real*>(v_out.depth)[place];
        behind += static_cast<const Real*>(out.depth)[place] * depth;
      }
    }
  }
};

// Adds each Gaussian's rows to the gradients of its colours, in their order.
template <class Real>
void sum_color_grads(const SplatCall& call, const SplatFrame& frame, int64_t first, int64_t width) {
  using F = Lanes<Real, kLanes>;
  const SplatChannels& channels = *frame.channels;
  parallel_for(call.threads, chunks_of(channels.n), [&](int64_t chunk) {
    for (int64_t i = chunk * kChunk; i < chunk * kChunk + frame.chunk_counts[2 * chunk]; ++i) {
      if (frame.tiles_per_gauss[i] == 0) continue;
      const Real* rows = static_cast<const Real*>(channels.isect_grads) + int64_t(frame.isect_grad_starts[i]) * width;
      Real* sums = static_cast<Real*>(channels.v_colors) + int64_t(frame.ids[i]) * channels.count + first;
      for (int64_t c = 0; c < width; c += kLanes) {
        const int left = int(std::min<int64_t>(kLanes, width - c));
        const auto load = [&](const Real* from) { return left == kLanes ? F::load(from) : load_first(from, left); };
        F total = load(sums + c);
        for (uint32_t k = 0; k < frame.tiles_per_gauss[i]; ++k) total += load(rows + k * width + c);
        left == kLanes ? total.store(sums + c) : store_first(total, sums + c, left);
      }
    }
  });
}

}  // namespace

template <class Real>
void Stages<Real>::blend_channels(const SplatCall& call, const SplatView& view, const SplatFrame& frame,
                                  const void* background, const SplatImages& out) {
  const Real* bg = static_cast<const Real*>(background);
  if (view.with_depth) {
    for_tiles(call, view, TileChannels<Real, true>{view, frame, bg, out});
  } else {
    for_tiles(call, view, TileChannels<Real, false>{view, frame, bg, out});
  }
}

template <class Real>
void Stages<Real>::blend_channels_vjp(const SplatCall& call, const SplatView& view, const SplatFrame& frame,
                                      const SplatImages& out, const SplatImages& v_out, void* background_partials,
                                      void* v_background) {
  const int64_t channels = frame.channels->count;
  Real* partials = static_cast<Real*>(background_partials);
  for (int64_t first = 0; first < channels; first += SPLAT_CHANNELS_AT_ONCE) {
    const int64_t width = std::min<int64_t>(SPLAT_CHANNELS_AT_ONCE, channels - first);
    const auto run = [&](auto geometry, auto depth, auto abs) {
      for_tiles(call, view,
                TileChannelsVjp<Real, geometry(), depth(), abs()>{view, frame, out, v_out, first == 0 ? partials : nullptr,
                                                                  first, width});
    };
    const std::true_type yes;
    const std::false_type no;
    if (first > 0 || frame.isect_grads == nullptr) {
      if (first > 0 && frame.channels->v_colors == nullptr) break;
      run(no, no, no);
    } else if (frame.with_abs) {
      v_out.depth != nullptr ? run(yes, yes, yes) : run(yes, no, yes);
    } else {
      v_out.depth != nullptr ? run(yes, yes, no) : run(yes, no, no);
    }
    if (frame.channels->v_colors != nullptr) sum_color_grads<Real>(call, frame, first, width);
  }
  if (v_background == nullptr) return;
  const int64_t tiles = tiles_of(view);
  Real* sum = static_cast<Real*>(v_background);
  std::fill(sum, sum + channels, Real(0));
  for (int64_t t = 0; t < tiles; ++t)
    for (int64_t c = 0; c < channels; ++c) sum[c] += partials[channels * t + c];
}

#define SPLAT_INSTANTIATE(Real)                                                                                       \
  template void Stages<Real>::blend_channels(const SplatCall&, const SplatView&, const SplatFrame&, const void*,      \
                                             const SplatImages&);                                                     \
  template void Stages<Real>::blend_channels_vjp(const SplatCall&, const SplatView&, const SplatFrame&,               \
                                                 const SplatImages&, const SplatImages&, void*, void*);
SPLAT_INSTANTIATE(float)
#ifdef SPLAT_WITH_DOUBLE
SPLAT_INSTANTIATE(double)
#endif

}  // namespace splat
