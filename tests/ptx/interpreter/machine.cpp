// How a block runs: warps until they wait, barriers, and where each instruction's operands lie.
#include "machine.h"

#include <algorithm>
#include <cfenv>
#include <cstdlib>
#include <set>

#include "block.h"
#include "handlers.h"

namespace machine {

Options options;

// ---- compiling ------------------------------------------------------------------------------------------------------

namespace {

bool has(const std::vector<std::string>& parts, const char* word) {
  return std::find(parts.begin(), parts.end(), word) != parts.end();
}

int type_bytes(const std::string& type) {
  if (type == "pred") return 0;
  if (type.size() < 2 || !strchr("busf", type[0]) || !isdigit((unsigned char)type[1])) return -1;
  return std::atoi(type.c_str() + 1) / 8;
}

class Compiler {
 public:
  Compiler(const ptx::Function& f, Program& p, const std::map<std::string, ptx::Variable*>& globals)
      : f(f), p(p), globals(globals) {}

  void run() {
    p.name = f.name, p.params = f.params, p.param_bytes = f.param_bytes, p.maxntid = f.maxntid;
    for (const auto& [name, bytes] : f.registers) registers[name] = {place(bytes), bytes};
    for (const ptx::Variable& v : f.variables) {
      int64_t& top = v.space == ptx::Space::kShared ? p.shared_bytes : p.local_bytes;
      if (v.space != ptx::Space::kShared && v.space != ptx::Space::kLocal) continue;  // .param of calls
      top = (top + v.align - 1) / v.align * v.align;
      symbols[v.name] = {v.space, top};
      top += v.bytes;
    }
    // Variables of the module that lie in shared memory: those that this function names.
    for (const auto& [name, v] : globals) {
      if (v->space != ptx::Space::kShared || v->is_extern || !names(name)) continue;
      p.shared_bytes = (p.shared_bytes + v->align - 1) / v->align * v->align;
      symbols[name] = {ptx::Space::kShared, p.shared_bytes};
      p.shared_bytes += v->bytes;
    }
    p.shared_bytes = (p.shared_bytes + 15) / 16 * 16;
    for (const auto& [name, v] : globals)
      if (v->space == ptx::Space::kShared && v->is_extern) symbols[name] = {ptx::Space::kShared, p.shared_bytes};
    for (const ptx::Statement& s : f.body) statement(s);
    Ins end;
    end.kind = Kind::kExit, end.run = handler_of("nothing"), end.id = int(p.code.size());
    p.code.push_back(end);
    p.opcodes.push_back("ret");
    p.counts.resize(p.code.size());
  }

 private:
  struct Register {
    uint32_t at;
    int bytes;
  };
  struct Symbol {
    ptx::Space space;
    int64_t at;
  };
  const ptx::Function& f;
  Program& p;
  const std::map<std::string, ptx::Variable*>& globals;
  std::map<std::string, Register> registers;
  std::map<std::string, Symbol> symbols;
  std::map<std::pair<int, uint64_t>, uint32_t> constants;

  uint32_t place(int bytes) {
    const uint32_t size = bytes == 0 ? 4 : uint32_t(bytes) * kLanes;
    const uint32_t to = bytes == 0 ? 4 : 64;
    p.register_bytes = (p.register_bytes + to - 1) / to * to;
    const uint32_t at = p.register_bytes;
    p.register_bytes += size;
    return at;
  }
  bool names(const std::string& name) const {
    for (const ptx::Statement& s : f.body)
      for (const ptx::Operand& o : s.operands)
        if (o.name == name) return true;
    return false;
  }
  uint32_t constant(int bytes, uint64_t bits) {
    if (bytes < 8) bits &= (1ull << 8 * bytes) - 1;
    const auto found = constants.find({bytes, bits});
    if (found != constants.end()) return found->second;
    const uint32_t at = place(bytes);
    p.constants.push_back({at, bytes, bits});
    return constants[{bytes, bits}] = at;
  }
  uint32_t predicate_constant(bool value) {
    const uint32_t at = place(0);
    p.constants.push_back({at, 0, value ? 1u : 0u});
    return at;
  }

  // Where an operand of `bytes` lies; *wide its register's bytes.
  uint32_t value(const ptx::Operand& o, int bytes, bool is_float = false, int* wide = nullptr) {
    if (wide) *wide = bytes;
    if (o.kind == ptx::OperandKind::kImmediate) {
      if (bytes == 0) return predicate_constant(o.bits != 0);
      uint64_t bits = o.bits;
      if (o.is_float && o.float_bytes == 8 && bytes == 4) {
        double d;
        std::memcpy(&d, &bits, 8);
        const float x = float(d);
        bits = 0;
        std::memcpy(&bits, &x, 4);
      } else if (!o.is_float && is_float && bytes == 4) {
        const float x = float(int64_t(bits));
        bits = 0;
        std::memcpy(&bits, &x, 4);
      }
      return constant(bytes, bits);
    }
    if (o.kind == ptx::OperandKind::kNothing) return kNone;
    if (o.kind != ptx::OperandKind::kRegister) throw ptx::Error("an operand that is no value");
    const auto found = registers.find(o.name);
    if (found != registers.end()) {
      if (wide) *wide = found->second.bytes;
      if (!wide && found->second.bytes < bytes) throw ptx::Error("a register that is too narrow");
      if (!wide && found->second.bytes != bytes) throw ptx::Error("a register of another size");
      return found->second.at;
    }
    if (o.name[0] == '%') {
      if (o.name == "WARP_SZ") return constant(bytes, 32);
      const std::string name = o.name + (bytes == 8 ? ":64" : "");
      static const std::set<std::string> known = {"%laneid",      "%warpid",      "%nwarpid",          "%nsmid",
                                                  "%smid",        "%lanemask_lt", "%lanemask_le",      "%lanemask_gt",
                                                  "%lanemask_ge", "%lanemask_eq", "%dynamic_smem_size"};
      const std::string axes = o.name.substr(0, o.name.find('.'));
      if (known.count(o.name) == 0 && axes != "%tid" && axes != "%ntid" && axes != "%ctaid" && axes != "%nctaid")
        throw ptx::Error("no register " + o.name);
      const auto special = p.specials.find(name);
      if (special != p.specials.end()) return special->second;
      return p.specials[name] = place(bytes);
    }
    return symbol(o, bytes, nullptr);
  }
  // The address of a variable.
  uint32_t symbol(const ptx::Operand& o, int bytes, ptx::Space* space) {
    const auto mine = symbols.find(o.name);
    if (mine != symbols.end()) {
      if (space) *space = mine->second.space;
      return constant(bytes, uint64_t(mine->second.at) + o.bits);
    }
    for (const ptx::Variable& v : f.params)
      if (v.name == o.name) {
        if (space) *space = ptx::Space::kParam;
        const uint32_t at = place(8);
        p.param_symbols.push_back(at);
        p.param_offsets.push_back(v.at + int64_t(o.bits));
        return at;
      }
    const auto global = globals.find(o.name);
    if (global == globals.end()) throw ptx::Error("no symbol " + o.name);
    if (space) *space = global->second->space;
    return constant(8, uint64_t(global->second->at) + o.bits);
  }

  void statement(const ptx::Statement& s) {
    Ins i;
    i.id = int(p.code.size()), i.line = s.line;
    if (!s.guard.empty()) {
      i.guard = registers.at(s.guard).at;
      i.guard_negated = s.guard_negated;
    }
    try {
      check_words(s.parts);
      decode(s, i);
      if (i.run == nullptr && i.kind == Kind::kPlain) i.kind = Kind::kUnknown;
    } catch (const std::exception& error) {
      i.kind = Kind::kUnknown;
      p.reasons[i.id] = error.what();
    }
    p.code.push_back(i);
    p.opcodes.push_back(s.opcode);
  }

  int target(const ptx::Operand& o) {
    const auto found = f.labels.find(o.name);
    if (found == f.labels.end()) throw ptx::Error("no label " + o.name);
    return found->second;
  }

  // Throws for a word of an opcode that is not heeded below: what is not known must not run as if it were.
  static void check_words(const std::vector<std::string>& parts) {
    static const std::string order = " weak relaxed acquire release acq_rel volatile cta cluster gpu sys ";
    static const std::string place = " global shared shared::cta local param const ";
    static const std::string cache =
        " nc ca cg cs lu cv wb wt L1::evict_first L1::evict_last L1::no_allocate L1::evict_normal"
        " L2::64B L2::128B L2::256B ";
    static const std::string compare = " eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan ";
    static const std::string round = " rn rz rm rp ";
    static const std::map<std::string, std::string> known = {
        {"bra", " uni "},
        {"ret", " uni "},
        {"exit", ""},
        {"trap", ""},
        {"call", " uni "},
        {"brkpt", ""},
        {"pragma", ""},
        {"bar", " sync red warp cta popc and or aligned "},
        {"barrier", " sync red cta popc and or aligned "},
        {"membar", " cta gl sys "},
        {"fence", " sc acq_rel acquire release cta cluster gpu sys "},
        {"nanosleep", ""},
        {"prefetch", place + "L1 L2 "},
        {"prefetchu", " L1 "},
        {"discard", " global L2 "},
        {"griddepcontrol", " launch_dependents wait "},
        {"ld", order + place + cache + "v2 v4 "},
        {"ldu", " global v2 v4 "},
        {"st", order + place + cache + "v2 v4 "},
        {"atom", order + place + "add min max and or xor exch cas inc dec "},
        {"red", order + place + "add min max and or xor inc dec "},
        {"cp", " async ca cg shared shared::cta global commit_group wait_all wait_group L2::64B L2::128B L2::256B "},
        {"cvta", place + "to "},
        {"setp", compare + "and or xor ftz "},
        {"selp", ""},
        {"shfl", " sync idx up down bfly "},
        {"vote", " sync ballot any all uni "},
        {"match", " sync any all "},
        {"redux", " sync add min max and or xor "},
        {"activemask", ""},
        {"cvt", round + "rni rzi rmi rpi ftz sat "},
        {"mov", ""},
        {"shf", " l r wrap clamp "},
        {"lop3", ""},
        {"prmt", ""},
        {"add", round + "ftz cc "},
        {"sub", round + "ftz cc "},
        {"addc", " cc "},
        {"subc", " cc "},
        {"mul", round + "ftz lo hi wide "},
        {"mad", round + "ftz lo hi wide cc "},
        {"madc", " lo hi cc "},
        {"fma", round + "ftz "},
        {"div", round + "approx full ftz "},
        {"rcp", round + "approx ftz "},
        {"sqrt", round + "approx ftz "},
        {"rsqrt", " approx ftz "},
        {"ex2", " approx ftz "},
        {"lg2", " approx ftz "},
        {"sin", " approx ftz "},
        {"cos", " approx ftz "},
        {"tanh", " approx "},
        {"rem", ""},
        {"neg", " ftz "},
        {"abs", " ftz "},
        {"min", " ftz "},
        {"max", " ftz "},
        {"copysign", ""},
        {"and", ""},
        {"or", ""},
        {"xor", ""},
        {"not", ""},
        {"cnot", ""},
        {"shl", ""},
        {"shr", ""},
        {"popc", ""},
        {"clz", ""},
        {"brev", ""},
        {"bfind", " shiftamt "},
        {"bfe", ""},
        {"bfi", ""},
        {"dp4a", ""},
        {"slct", ""},
        {"sad", ""},
        {"isspacep", place}};
    static const std::string types = " pred b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 f32 f64 ";
    const auto found = known.find(parts[0]);
    if (found == known.end()) throw ptx::Error("an opcode that is not known");
    for (size_t k = 1; k < parts.size(); ++k) {
      const std::string word = " " + parts[k] + " ";
      if (found->second.find(word) == std::string::npos && types.find(word) == std::string::npos)
        throw ptx::Error("." + parts[k] + " is not known of " + parts[0]);
    }
  }

  // `o` as a predicate that may be "!p"; the flag says so.
  uint32_t predicate(const ptx::Operand& o, bool* negated) {
    *negated = o.negated;
    return value(o, 0);
  }

  void decode(const ptx::Statement& s, Ins& i) {
    const std::vector<std::string>& parts = s.parts;
    const std::string& op = parts[0];
    const std::string& type = parts.back();
    const auto& o = s.operands;
    const int bytes = type_bytes(type);
    const bool is_float = type[0] == 'f';
    const auto is = [&](const char* word) { return has(parts, word); };

    if (op == "bra") {
      i.kind = Kind::kBranch, i.target = target(o.at(0)), i.run = handler_of("nothing");
      return;
    }
    if (op == "ret" || op == "exit") {
      i.kind = Kind::kExit, i.run = handler_of("nothing");
      return;
    }
    if (op == "trap" || op == "call" || op == "brkpt") throw ptx::Error("not to be reached");
    if (op == "membar" || op == "fence" || op == "pragma" || op == "nanosleep" || op == "prefetch" ||
        op == "prefetchu" || op == "discard" || op == "applypriority" || op == "setmaxnreg" || op == "griddepcontrol") {
      i.run = handler_of("nothing");
      return;
    }
    if (op == "bar" || op == "barrier") {
      if (is("warp")) {
        i.kind = Kind::kWarpSync, i.run = handler_of("syncwarp"), i.c = value(o.at(0), 4);
        return;
      }
      i.kind = Kind::kBarrier, i.run = handler_of("nothing");
      i.mode = is("red") ? (is("popc") ? 1 : is("and") ? 2 : 3) : 0;
      size_t k = 0;
      if (i.mode) i.d = i.mode == 1 ? value(o.at(k++), 4) : value(o.at(k++), 0);
      if (o.at(k).kind != ptx::OperandKind::kImmediate || o[k].bits != 0) throw ptx::Error("a barrier other than 0");
      ++k;
      if (i.mode) {
        if (k + 1 < o.size()) throw ptx::Error("a barrier of some threads");
        i.a = predicate(o.at(k), &i.is_signed);
      } else if (k < o.size()) {
        throw ptx::Error("a barrier of some threads");
      }
      return;
    }
    if (op == "ld" || op == "ldu" || op == "st") return transfer(s, i, bytes, type);
    if (op == "atom" || op == "red") return atomic(s, i, bytes, type);
    if (op == "cp" && parts.at(1) == "async") return copy(s, i);
    if (op == "cvta") {
      i.run = handler_of("cvta");
      i.mode = is("to") ? 1 : 0;
      i.imm = int64_t(is("shared") ? kSharedWindow : is("local") ? kLocalWindow : 0);
      i.d = value(o.at(0), 8), i.a = value(o.at(1), 8);
      return;
    }
    if (op == "setp") return set_predicate(s, i, bytes, is_float);
    if (op == "selp") {
      i.run = handler_of("selp." + type);
      bool negated;
      i.d = value(o.at(0), bytes), i.a = value(o.at(1), bytes, is_float), i.b = value(o.at(2), bytes, is_float);
      i.c = predicate(o.at(3), &negated);
      if (negated) throw ptx::Error("a negated predicate");
      return;
    }
    if (op == "shfl") {
      i.kind = Kind::kWarpSync, i.run = handler_of("shfl");
      i.mode = is("up") ? 1 : is("down") ? 2 : is("bfly") ? 3 : 0;
      if (o.at(0).kind == ptx::OperandKind::kPair) {
        i.d = value(o[0].elements[0], 4), i.e = value(o[0].elements[1], 0);
      } else {
        i.d = value(o[0], 4);
      }
      i.a = value(o.at(1), 4), i.b = value(o.at(2), 4), i.elements[0] = value(o.at(3), 4), i.c = value(o.at(4), 4);
      return;
    }
    if (op == "vote") {
      i.kind = Kind::kWarpSync, i.run = handler_of("vote");
      i.mode = is("ballot") ? 0 : is("any") ? 1 : is("all") ? 2 : 3;
      i.d = value(o.at(0), i.mode == 0 ? 4 : 0), i.a = predicate(o.at(1), &i.is_signed), i.c = value(o.at(2), 4);
      return;
    }
    if (op == "match") {
      i.kind = Kind::kWarpSync, i.run = handler_of((is("any") ? "match.any." : "match.all.") + type);
      if (o.at(0).kind == ptx::OperandKind::kPair) {
        i.d = value(o[0].elements[0], 4), i.e = value(o[0].elements[1], 0);
      } else {
        i.d = value(o[0], 4);
      }
      i.a = value(o.at(1), bytes), i.c = value(o.at(2), 4);
      return;
    }
    if (op == "redux") {
      i.kind = Kind::kWarpSync, i.run = handler_of("redux." + type);
      i.mode = is("add") ? 0 : is("min") ? 1 : is("max") ? 2 : is("and") ? 3 : is("or") ? 4 : 5;
      i.d = value(o.at(0), 4), i.a = value(o.at(1), 4), i.c = value(o.at(2), 4);
      return;
    }
    if (op == "activemask") {
      i.run = handler_of("activemask"), i.d = value(o.at(0), 4);
      return;
    }
    if (op == "cvt") return conversion(s, i);
    if (type == "pred") {
      i.run = handler_of(op + ".pred");
      i.d = value(o.at(0), 0);
      bool negated;
      i.a = predicate(o.at(1), &negated);
      if (o.size() > 2) i.b = predicate(o.at(2), &negated);
      return;
    }
    if (op == "mov" && o.at(1).kind == ptx::OperandKind::kVector) {
      i.run = handler_of("pack"), i.size = uint8_t(bytes), i.d = value(o[0], bytes),
      i.count = uint8_t(o[1].elements.size());
      for (int k = 0; k < i.count; ++k)
        i.wide[k] = uint8_t(bytes / i.count), i.elements[k] = value(o[1].elements[k], bytes / i.count);
      return;
    }
    if (op == "mov" && o.at(0).kind == ptx::OperandKind::kVector) {
      i.run = handler_of("unpack"), i.size = uint8_t(bytes), i.a = value(o[1], bytes),
      i.count = uint8_t(o[0].elements.size());
      for (int k = 0; k < i.count; ++k)
        i.wide[k] = uint8_t(bytes / i.count), i.elements[k] = value(o[0].elements[k], bytes / i.count);
      return;
    }
    if (op == "shf") {
      i.run = handler_of("shf"), i.mode = is("r") ? 1 : 0, i.is_signed = is("wrap");
      i.d = value(o.at(0), 4), i.a = value(o.at(1), 4), i.b = value(o.at(2), 4), i.c = value(o.at(3), 4);
      return;
    }
    if (op == "lop3") {
      i.run = handler_of("lop3.b32");
      i.d = value(o.at(0), 4), i.a = value(o.at(1), 4), i.b = value(o.at(2), 4), i.c = value(o.at(3), 4);
      i.imm = int64_t(o.at(4).bits);
      return;
    }
    if (op == "dp4a") {  // dp4a.atype.btype: mode 1 and 2 for signed a and b
      i.run = handler_of("dp4a"), i.mode = (parts.at(1)[0] == 's' ? 1 : 0) | (type[0] == 's' ? 2 : 0);
      i.d = value(o.at(0), 4), i.a = value(o.at(1), 4), i.b = value(o.at(2), 4), i.c = value(o.at(3), 4);
      return;
    }
    if (is("cc") || op == "addc" || op == "subc" || op == "madc") return carrying(s, i, bytes);
    arithmetic(s, i, bytes, is_float);
  }

  // mode: 1 takes the carry, 2 leaves one.
  void carrying(const ptx::Statement& s, Ins& i, int bytes) {
    const std::string& op = s.parts[0];
    const std::string base = op.back() == 'c' && op != "sub" ? op.substr(0, 3) : op;
    const char* const half = base != "mad" ? "" : has(s.parts, "hi") ? ".hi" : ".lo";
    i.run = handler_of("carry." + base + half + (bytes == 8 ? ".64" : ".32") + (s.parts.back()[0] == 's' ? "s" : "u"));
    i.mode = (op.size() == 4 ? 1 : 0) | (has(s.parts, "cc") ? 2 : 0);
    i.d = value(s.operands.at(0), bytes), i.a = value(s.operands.at(1), bytes), i.b = value(s.operands.at(2), bytes);
    if (base == "mad") i.c = value(s.operands.at(3), bytes);
  }

  void arithmetic(const ptx::Statement& s, Ins& i, int bytes, bool is_float) {
    const std::vector<std::string>& parts = s.parts;
    const std::string &op = parts[0], &type = parts.back();
    const auto& o = s.operands;
    std::string name = op;
    for (const char* word : {"lo", "hi", "wide", "approx", "full", "shiftamt"})
      if (has(parts, word)) name += std::string(".") + word;
    if (name == "rcp.approx" && type == "f64") throw ptx::Error("rcp.approx.f64");
    const bool approx = has(parts, "approx") || has(parts, "full");
    i.mode = approx && has(parts, "ftz") ? 1 : 0;
    const int rounding = has(parts, "rm")   ? FE_DOWNWARD
                         : has(parts, "rp") ? FE_UPWARD
                         : has(parts, "rz") ? FE_TOWARDZERO
                                            : 0;
    if (has(parts, "ftz") && !approx) {
      if (rounding != 0) throw ptx::Error("directed rounding that flushes");
      i.run = handler_of("ftz." + name + "." + type);
    } else if (rounding != 0 && is_float) {
      if (type != "f32") throw ptx::Error("directed rounding of doubles");
      i.run = handler_of(op + ".directed");
      i.mode = rounding;
    } else {
      i.run = handler_of(name + "." + type);
    }
    const bool wide = has(parts, "wide"), counts = op == "popc" || op == "clz" || op == "bfind";
    const bool shifts = op == "shl" || op == "shr";
    i.d = value(o.at(0), wide ? 2 * bytes : counts ? 4 : bytes);
    i.a = value(o.at(1), bytes, is_float);
    if (o.size() > 2) i.b = value(o[2], shifts || op == "bfe" ? 4 : bytes, is_float);
    if (o.size() > 3) i.c = value(o[3], wide ? 2 * bytes : op == "bfe" || op == "bfi" ? 4 : bytes, is_float);
    if (o.size() > 4) i.e = value(o[4], 4);
  }

  void set_predicate(const ptx::Statement& s, Ins& i, int bytes, bool is_float) {
    const auto& parts = s.parts;
    const auto& o = s.operands;
    i.run = handler_of((has(parts, "ftz") ? "ftz.setp." : "setp.") + parts.at(1) + "." + parts.back());
    if (o.at(0).kind == ptx::OperandKind::kPair) {
      i.d = value(o[0].elements[0], 0), i.e = value(o[0].elements[1], 0);
    } else {
      i.d = value(o[0], 0);
    }
    i.a = value(o.at(1), bytes, is_float), i.b = value(o.at(2), bytes, is_float);
    if (o.size() > 3) {
      i.c = predicate(o[3], &i.is_signed);
      i.mode = has(parts, "and") ? 0 : has(parts, "or") ? 1 : 2;
    }
  }

  void conversion(const ptx::Statement& s, Ins& i) {
    const auto& parts = s.parts;
    const auto& o = s.operands;
    const std::string &from = parts.back(), &to = parts[parts.size() - 2];
    const bool from_float = from[0] == 'f', to_float = to[0] == 'f';
    i.mode = has(parts, "rz") || has(parts, "rzi")   ? 1
             : has(parts, "rm") || has(parts, "rmi") ? 2
             : has(parts, "rp") || has(parts, "rpi") ? 3
                                                     : 0;
    const bool to_integer = has(parts, "rni") || has(parts, "rzi") || has(parts, "rmi") || has(parts, "rpi");
    if (to_float && to_integer) i.mode |= 32;
    if (has(parts, "sat")) i.mode |= 16;
    if (has(parts, "ftz")) i.mode |= 64;
    int wide_d, wide_a;
    i.d = value(o.at(0), type_bytes(to), to_float, &wide_d),
    i.a = value(o.at(1), type_bytes(from), from_float, &wide_a);
    i.wide[0] = uint8_t(wide_d), i.wide[1] = uint8_t(wide_a);
    if (to == from && (to == "f32" || to == "f64") && i.mode == 16) {
      i.run = handler_of("cvt.sat." + to);
      return;
    }
    const bool plain =
        wide_d == type_bytes(to) && wide_a == type_bytes(from) && i.mode == 0 && !(from_float && !to_float);
    if (plain) i.run = handler_of("plain.cvt." + to + "." + from);
    if (i.run == nullptr) i.run = handler_of("cvt." + to + "." + from);
  }

  static ptx::Space space_of(const std::vector<std::string>& parts) {
    for (const std::string& one : parts) {
      if (one == "global") return ptx::Space::kGlobal;
      if (one == "shared" || one == "shared::cta") return ptx::Space::kShared;
      if (one == "local") return ptx::Space::kLocal;
      if (one == "param") return ptx::Space::kParam;
      if (one == "const") return ptx::Space::kConst;
    }
    return ptx::Space::kNone;
  }
  // The address in `o`: b its register (64 bits, or 32), imm the offset.
  void address(const ptx::Operand& o, Ins& i, ptx::Space space) {
    if (o.kind != ptx::OperandKind::kMemory) throw ptx::Error("no address");
    i.imm = int64_t(o.bits);
    if (o.name.empty()) {
      i.b = constant(8, 0), i.wide[7] = 8;
      return;
    }
    const auto found = registers.find(o.name);
    if (found != registers.end()) {
      i.b = found->second.at, i.wide[7] = uint8_t(found->second.bytes);
      return;
    }
    ptx::Operand name = o;
    name.bits = 0;
    ptx::Space where = space;
    i.b = symbol(name, 8, &where), i.wide[7] = 8;
    if (where != space && !(where == ptx::Space::kConst || where == ptx::Space::kGlobal || space == ptx::Space::kNone))
      throw ptx::Error("a symbol of another space");
  }

  void transfer(const ptx::Statement& s, Ins& i, int bytes, const std::string& type) {
    const auto& o = s.operands;
    const bool load = s.parts[0] != "st";
    const ptx::Space space = space_of(s.parts);
    const ptx::Operand &memory = o.at(load ? 1 : 0), &data = o.at(load ? 0 : 1);
    address(memory, i, space);
    if (bytes < 1 || bytes > 8) throw ptx::Error("no such transfer");
    i.size = uint8_t(bytes), i.is_signed = type[0] == 's';
    const std::vector<ptx::Operand> elements =
        data.kind == ptx::OperandKind::kVector ? data.elements : std::vector<ptx::Operand>{data};
    i.count = uint8_t(elements.size());
    if (i.count > 4) throw ptx::Error("more than four at once");
    for (int k = 0; k < i.count; ++k) {
      int wide;
      i.elements[k] = value(elements[k], bytes, type[0] == 'f', &wide);
      i.wide[k] = uint8_t(wide);
    }
    i.run = memory_handler(load ? "ld" : "st", space);
  }

  void atomic(const ptx::Statement& s, Ins& i, int bytes, const std::string& type) {
    const auto& o = s.operands;
    const bool returns = s.parts[0] == "atom";
    const ptx::Space space = space_of(s.parts);
    const char* const kinds[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
    i.mode = -1;
    for (int k = 0; k < 10; ++k)
      if (has(s.parts, kinds[k])) i.mode = k;
    if (i.mode < 0 || o.at(returns ? 1 : 0).kind != ptx::OperandKind::kMemory) throw ptx::Error("an atomic");
    if (bytes != 4 && bytes != 8) throw ptx::Error("an atomic of that size");
    address(o[returns ? 1 : 0], i, space);
    i.size = uint8_t(bytes);
    i.target = type[0] == 'f' ? 2 : type[0] == 's' ? 1 : 0;
    if (returns) i.d = value(o[0], bytes);
    i.a = value(o.at(returns ? 2 : 1), bytes, type[0] == 'f');
    if (i.mode == 7) i.c = value(o.at(returns ? 3 : 2), bytes);
    i.run = memory_handler("atom", space);
  }

  void copy(const ptx::Statement& s, Ins& i) {
    const auto& o = s.operands;
    if (has(s.parts, "commit_group")) {
      i.run = memory_handler("commit", ptx::Space::kNone);
    } else if (has(s.parts, "wait_all")) {
      i.run = memory_handler("wait", ptx::Space::kNone), i.mode = 0;
    } else if (has(s.parts, "wait_group")) {
      i.run = memory_handler("wait", ptx::Space::kNone), i.mode = int(o.at(0).bits) + 1;
    } else {
      if (o.size() > 3) throw ptx::Error("cp.async that fills");
      i.size = uint8_t(o.at(2).bits);
      ptx::Operand from = o.at(1);
      address(o.at(0), i, ptx::Space::kShared);
      i.wide[0] = i.wide[7];
      i.a = i.b;
      i.mode = int(i.imm);
      address(from, i, ptx::Space::kGlobal);
      i.run = memory_handler("cp.async", ptx::Space::kShared);
    }
  }
};

}  // namespace

Loaded::Loaded(const std::string& text) : module_(ptx::parse(text)) {
  for (ptx::Variable& v : module_.variables) {
    variables_[v.name] = &v;
    if (v.space != ptx::Space::kGlobal && v.space != ptx::Space::kConst) continue;
    memory_.emplace_back(new uint8_t[size_t(v.bytes) + 256]());
    const uintptr_t at = (reinterpret_cast<uintptr_t>(memory_.back().get()) + 255) / 256 * 256;
    v.at = int64_t(at);
    if (!v.initial.empty())
      std::memcpy(reinterpret_cast<void*>(at), v.initial.data(), std::min<size_t>(v.initial.size(), size_t(v.bytes)));
  }
  for (const ptx::Variable& v : module_.variables)
    for (const auto& [at, name] : v.addresses)
      if (variables_.count(name)) std::memcpy(reinterpret_cast<void*>(v.at + at), &variables_[name]->at, 8);
  for (const auto& [name, f] : module_.functions) compile(f);
}

void Loaded::allow_variables() {
  for (const ptx::Variable& v : module_.variables)
    if (v.space == ptx::Space::kGlobal || v.space == ptx::Space::kConst) allow(uint64_t(v.at), uint64_t(v.bytes));
}

void Loaded::compile(const ptx::Function& f) {
  auto program = std::make_unique<Program>();
  program->target = module_.target;
  Compiler(f, *program, variables_).run();
  programs_[f.name] = std::move(program);
}
Program* Loaded::find(const std::string& name) {
  const auto found = programs_.find(name);
  return found == programs_.end() ? nullptr : found->second.get();
}
ptx::Variable* Loaded::variable(const std::string& name) {
  const auto found = variables_.find(name);
  return found == variables_.end() ? nullptr : found->second;
}

// ---- running --------------------------------------------------------------------------------------------------------

namespace {

uint64_t random_state;
uint64_t random_number() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}

std::string lanes_of(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "%08x", mask);
  return text;
}

// One warp, until all its lanes wait or have ended, or it has run long enough.
class Runner {
 public:
  Runner(Program& p, Warp& w) : p(p), w(w), code(p.code.data()), counts(p.counts.data()) {}

  void run() {
    int64_t fuel = options.seed == 0 ? INT64_MAX : int64_t(random_number() % 400) + 1;
    for (;;) {
      const int picked = pick();
      if (picked < 0) return;
      const int at = join(picked);
      if (options.seed != 0) tear(at);
      if (!go(w.fragments[at], at, fuel)) return;
    }
  }

 private:
  Program& p;
  Warp& w;
  const Ins* const code;
  Count* const counts;

  // The fragment that is furthest behind; with a seed any.
  int pick() const {
    int best = -1;
    if (options.seed != 0 && random_number() % 8 == 0) {
      const int from = int(random_number() % uint64_t(w.fragment_count + 1));
      for (int k = 0; k < w.fragment_count; ++k) {
        const int f = (from + k) % w.fragment_count;
        if (w.fragments[f].state == Fragment::kRuns) return f;
      }
      return -1;
    }
    for (int k = 0; k < w.fragment_count; ++k)
      if (w.fragments[k].state == Fragment::kRuns && (best < 0 || w.fragments[k].pc < w.fragments[best].pc)) best = k;
    return best;
  }
  // Takes in all that stand where it stands; its place then.
  int join(int at) {
    for (int k = w.fragment_count - 1; k >= 0; --k) {
      if (k == at || w.fragments[k].pc != w.fragments[at].pc) continue;
      w.fragments[at].mask |= w.fragments[k].mask;
      const int last = --w.fragment_count;
      w.fragments[k] = w.fragments[last];
      if (at == last) at = k;
    }
    return at;
  }
  // Lanes need not stay together.
  void tear(int at) {
    if (random_number() % 16 != 0 || w.fragment_count == kLanes) return;
    const uint32_t mask = w.fragments[at].mask, away = mask & uint32_t(random_number() >> 16);
    if (away == 0 || away == mask) return;
    w.fragments[at].mask = mask & ~away;
    w.fragments[w.fragment_count++] = {w.fragments[at].pc, away, Fragment::kRuns};
  }
  void remove(int at) { w.fragments[at] = w.fragments[--w.fragment_count]; }

  [[noreturn]] void fault(const Ins& i, uint32_t mask, const std::string& words) const {
    throw Fault(words + " (" + p.opcodes[size_t(i.id)] + ", PTX line " + std::to_string(i.line) + ", block " +
                std::to_string(w.block->index) + ", warp " + std::to_string(w.index) + ", lanes " + lanes_of(mask) +
                ")");
  }

  // Runs a fragment until it has to be picked again; false when the warp's turn is over.
  bool go(Fragment& f, int at, int64_t& fuel) {
    int limit = INT32_MAX;
    for (int k = 0; k < w.fragment_count; ++k)
      if (k != at && w.fragments[k].pc > f.pc && w.fragments[k].pc < limit) limit = w.fragments[k].pc;
    int pc = f.pc;
    const uint32_t mask = f.mask;
    for (;;) {
      const Ins& i = code[pc];
      uint32_t here = mask;
      if (i.guard != kNone) {
        const uint32_t g = w.predicate(i.guard);
        here &= i.guard_negated ? ~g : g;
      }
      Count& count = counts[pc];
      ++count.warps;
      count.lanes += uint32_t(__builtin_popcount(here));
      switch (i.kind) {
        case Kind::kPlain:
          if (here) {
            try {
              i.run(w, i, here);
            } catch (const Fault& error) {
              fault(i, here, error.what());
            }
          }
          ++pc;
          break;
        case Kind::kBranch:
          if (here == 0) {
            ++pc;
          } else if (here == mask) {
            const bool back = i.target <= pc;
            if (back && ++w.block->turns > options.patience) fault(i, here, "a loop without end");
            pc = i.target;
            if (back || pc > limit) {
              f.pc = pc;
              if (w.fragment_count > 1 || options.seed != 0) return --fuel > 0;
            }
          } else {
            f.pc = pc + 1, f.mask = mask & ~here;
            w.fragments[w.fragment_count++] = {i.target, here, Fragment::kRuns};
            return true;
          }
          break;
        case Kind::kExit:
          w.live &= ~here;
          for (int k = 0; k < w.fragment_count; ++k)  // what they wait for may have ended: tried again
            if (w.fragments[k].state == Fragment::kWaitsForLanes) w.fragments[k].state = Fragment::kRuns;
          if (here == mask) {
            remove(at);
            return true;
          }
          f.mask = mask & ~here, f.pc = here ? pc + 1 : pc;
          if (!here) f.pc = pc + 1;
          return true;
        case Kind::kBarrier:
          if (here != mask) {
            if (here == 0) {
              ++pc;
              break;
            }
            fault(i, here, "a barrier that some lanes pass by");
          }
          f.pc = pc, f.state = Fragment::kWaitsForBlock;
          return true;
        case Kind::kWarpSync: {
          if (here == 0) {
            ++pc;
            break;
          }
          uint32_t wanted = 0;
          const uint32_t* members = w.lanes<uint32_t>(i.c);
          for (int l = 0; l < kLanes; ++l)
            if (here >> l & 1u) {
              wanted |= members[l];
              if (!(members[l] >> l & 1u)) fault(i, here, "a lane is not in its own member mask");
            }
          if (options.lenient) wanted &= w.live;
          if (wanted & ~here) {
            if (wanted & ~w.live) fault(i, here, "waits for lanes that have ended: " + lanes_of(wanted & ~w.live));
            if (here != mask) fault(i, here, "a warp operation that some lanes pass by");
            f.pc = pc, f.state = Fragment::kWaitsForLanes;
            return true;
          }
          try {
            i.run(w, i, here);
          } catch (const Fault& error) {
            fault(i, here, error.what());
          }
          ++pc;
          break;
        }
        case Kind::kUnknown: {
          const auto why = p.reasons.find(i.id);
          fault(i, here, "an instruction that is not known, or not to be reached" +
                             (why == p.reasons.end() ? std::string() : ": " + why->second));
        }
      }
      if (pc >= limit) {
        f.pc = pc;
        return true;
      }
      if (options.seed != 0 && --fuel <= 0) {
        f.pc = pc;
        return false;
      }
    }
  }
};

class BlockRunner {
 public:
  BlockRunner(Program& p, Block& block) : p(p), block(block) {}

  void run() {
    std::vector<int> order(block.warps.size());
    for (size_t k = 0; k < order.size(); ++k) order[k] = int(k);
    for (;;) {
      if (options.seed != 0)
        for (size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[random_number() % k]);
      bool runs = false;
      for (int k : order) {
        Runner(p, block.warps[size_t(k)]).run();
        const Warp& w = block.warps[size_t(k)];
        for (int f = 0; f < w.fragment_count; ++f) runs |= w.fragments[f].state == Fragment::kRuns;
      }
      if (runs) continue;
      if (!barrier()) return;
    }
  }

 private:
  Program& p;
  Block& block;

  // All wait: at a barrier, or for each other. False: all have ended.
  bool barrier() {
    const Ins* first = nullptr;
    uint64_t ended = 0, waiting = 0;
    int yes = 0;
    bool all = true;
    for (Warp& w : block.warps) {
      ended += uint64_t(__builtin_popcount(w.born & ~w.live));
      for (int k = 0; k < w.fragment_count; ++k) {
        const Fragment& f = w.fragments[k];
        const Ins& i = p.code[size_t(f.pc)];
        const std::string where = p.opcodes[size_t(f.pc)] + ", PTX line " + std::to_string(i.line) + ", block " +
                                  std::to_string(block.index) + ", warp " + std::to_string(w.index) + ", lanes " +
                                  lanes_of(f.mask);
        if (f.state == Fragment::kWaitsForLanes) throw Fault("lanes wait for others that never come (" + where + ")");
        if (first == nullptr) first = &i;
        if (first->id != i.id)
          throw Fault("threads wait at different barriers: PTX line " + std::to_string(first->line) + " and " + where);
        waiting += uint64_t(__builtin_popcount(f.mask));
        if (i.mode) {
          const uint32_t q = (i.is_signed ? ~w.predicate(i.a) : w.predicate(i.a)) & f.mask;
          yes += __builtin_popcount(q);
          all = all && q == f.mask;
        }
      }
    }
    if (first == nullptr) return false;
    if (ended > 0 && !options.lenient)
      throw Fault("a barrier (PTX line " + std::to_string(first->line) + ") that " + std::to_string(ended) +
                  " threads of block " + std::to_string(block.index) + " do not reach");
    for (Warp& w : block.warps)
      for (int k = 0; k < w.fragment_count; ++k) {
        Fragment& f = w.fragments[k];
        const Ins& i = p.code[size_t(f.pc)];
        if (i.mode == 1) {
          uint32_t* d = w.lanes<uint32_t>(i.d);
          for (int l = 0; l < kLanes; ++l)
            if (f.mask >> l & 1u) d[l] = uint32_t(yes);
        } else if (i.mode) {
          const bool r = i.mode == 2 ? all : yes > 0;
          w.predicate(i.d) = (w.predicate(i.d) & ~f.mask) | (r ? f.mask : 0u);
        }
        ++f.pc, f.state = Fragment::kRuns;
        ++w.epoch;
      }
    ++block.epoch;
    return true;
  }
};

void set_special(Warp& w, const std::string& name, uint32_t at, Dim grid, Dim block, Dim place) {
  const std::string base = name.substr(0, name.find(':'));
  const bool wide = base.size() != name.size();
  for (int l = 0; l < kLanes; ++l) {
    const unsigned thread = unsigned(w.index * kLanes + l);
    const unsigned tid[3] = {thread % block.x, thread / block.x % block.y, thread / (block.x * block.y)};
    const unsigned ntid[3] = {block.x, block.y, block.z}, ctaid[3] = {place.x, place.y, place.z},
                   nctaid[3] = {grid.x, grid.y, grid.z};
    uint64_t v = 0;
    const auto dot = base.find('.');
    const int axis = dot == std::string::npos ? -1 : base[dot + 1] - 'x';
    const std::string word = base.substr(1, dot == std::string::npos ? std::string::npos : dot - 1);
    if (axis >= 0 && axis < 3) {
      v = word == "tid" ? tid[axis] : word == "ntid" ? ntid[axis] : word == "ctaid" ? ctaid[axis] : nctaid[axis];
    } else if (word == "laneid") {
      v = unsigned(l);
    } else if (word == "warpid") {
      v = unsigned(w.index);
    } else if (word == "nwarpid" || word == "nsmid") {
      v = 32;
    } else if (word == "lanemask_lt") {
      v = (1u << l) - 1u;
    } else if (word == "lanemask_le") {
      v = (2ull << l) - 1u;
    } else if (word == "lanemask_gt") {
      v = kAll & ~((2ull << l) - 1u);
    } else if (word == "lanemask_ge") {
      v = kAll & ~((1ull << l) - 1u);
    } else if (word == "lanemask_eq") {
      v = 1u << l;
    } else if (word == "dynamic_smem_size") {
      v = w.block->shared_bytes;
    }
    if (wide) {
      w.lanes<uint64_t>(at)[l] = v;
    } else {
      w.lanes<uint32_t>(at)[l] = uint32_t(v);
    }
  }
}

}  // namespace

void launch(Program& p, Dim grid, Dim block, void** arguments, int64_t dynamic_shared) {
  const unsigned threads = block.x * block.y * block.z;
  if (threads == 0 || threads > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0)
    throw Fault("a launch of that shape is refused");
  if (p.maxntid != 0 && threads > unsigned(p.maxntid)) throw Fault("more threads than the kernel's launch bounds");
  ++p.launches;
  alignas(16) static thread_local uint8_t params[8192];
  std::memset(params, 0, sizeof params);
  for (size_t k = 0; k < p.params.size(); ++k)
    std::memcpy(params + p.params[k].at, arguments[k], size_t(p.params[k].bytes));

  Block state;
  state.shared_bytes = uint64_t(p.shared_bytes + dynamic_shared);
  state.shared.resize(state.shared_bytes + 16);
  state.program = &p;
  const size_t warps = (threads + kLanes - 1) / kLanes;
  state.warps.resize(warps);
  const size_t stride = (p.register_bytes + 63) / 64 * 64;
  std::unique_ptr<uint8_t, void (*)(void*)> file(
      static_cast<uint8_t*>(std::aligned_alloc(64, std::max<size_t>(64, stride * warps))), std::free);
  std::memset(file.get(), 0xa5, stride * warps);
  state.local_bytes = uint64_t((p.local_bytes + 15) / 16 * 16);
  state.local.resize(state.local_bytes * threads);
  for (size_t k = 0; k < warps; ++k) {
    Warp& w = state.warps[k];
    w.registers = file.get() + k * stride, w.block = &state, w.index = int(k);
    for (const Program::Constant& c : p.constants) {
      if (c.bytes == 0) {
        w.predicate(c.at) = c.bits ? kAll : 0u;
        continue;
      }
      for (int l = 0; l < kLanes; ++l) std::memcpy(w.registers + c.at + l * c.bytes, &c.bits, size_t(c.bytes));
    }
    for (size_t s = 0; s < p.param_symbols.size(); ++s)
      for (int l = 0; l < kLanes; ++l)
        w.lanes<uint64_t>(p.param_symbols[s])[l] = reinterpret_cast<uint64_t>(params) + uint64_t(p.param_offsets[s]);
    const unsigned left = threads - unsigned(k) * kLanes;
    w.born = left >= unsigned(kLanes) ? kAll : (1u << left) - 1u;
  }
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  p.blocks += blocks;
  uint64_t step = 1, from = 0;
  if (options.seed != 0) {
    random_state = options.seed * 0x9e3779b97f4a7c15ull + p.launches;
    from = random_number() % blocks;
    do step = random_number() % blocks + 1;
    while (std::__gcd(step, blocks) != 1);
  }
  begin_launch(state);
  uint64_t n =
      options.last_blocks > 0 && uint64_t(options.last_blocks) < blocks ? blocks - uint64_t(options.last_blocks) : 0;
  const uint64_t first = n;
  for (; n < blocks; ++n) {
    const uint64_t at = options.seed == 0 ? n : (from + n * step) % blocks;
    const Dim place = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y), unsigned(at / grid.x / grid.y)};
    state.index = int64_t(at), state.turns = 0;
    // What nobody wrote is no number.
    std::memset(state.shared.data(), 0xff, state.shared.size());
    if (!state.local.empty()) std::memset(state.local.data(), 0xff, state.local.size());
    begin_block(state);
    for (Warp& w : state.warps) {
      w.live = w.born, w.fragment_count = 1;
      w.fragments[0] = {0, w.born, Fragment::kRuns};
      w.copies.clear();
      for (const auto& [name, where] : p.specials)
        if (n == first || name.compare(0, 6, "%ctaid") == 0) set_special(w, name, where, grid, block, place);
    }
    BlockRunner(p, state).run();
  }
  end_launch(state);
}

}  // namespace machine
