#include "ptx.h"

#include <cctype>
#include <cstdlib>
#include <cstring>

namespace ptx {
namespace {

struct Token {
  std::string text;
  int line;
};

bool is_word(char c) { return std::isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%' || c == '.'; }

std::vector<Token> tokens_of(const std::string& s) {
  std::vector<Token> out;
  int line = 1;
  for (size_t i = 0; i < s.size();) {
    const char c = s[i];
    if (c == '\n') {
      ++line, ++i;
    } else if (std::isspace((unsigned char)c) || c == 0) {
      ++i;
    } else if (c == '/' && s[i + 1] == '/') {
      while (i < s.size() && s[i] != '\n') ++i;
    } else if (c == '/' && s[i + 1] == '*') {
      for (i += 2; i + 1 < s.size() && !(s[i] == '*' && s[i + 1] == '/'); ++i) line += s[i] == '\n';
      i += 2;
    } else if (c == '"') {
      size_t j = s.find('"', i + 1);
      out.push_back({s.substr(i, j - i + 1), line});
      i = j + 1;
    } else if (is_word(c)) {
      size_t j = i;
      while (j < s.size() && (is_word(s[j]) || (s[j] == ':' && s[j + 1] == ':'))) j += s[j] == ':' ? 2 : 1;
      out.push_back({s.substr(i, j - i), line});
      i = j;
    } else {
      out.push_back({std::string(1, c), line});
      ++i;
    }
  }
  return out;
}

int bytes_of(const std::string& type) {
  if (type == ".pred") return 0;
  if (type == ".b128") return 16;
  const int bits = std::atoi(type.c_str() + 2);
  if (bits < 8) throw Error("no type " + type);
  return bits / 8;
}

std::vector<std::string> split(const std::string& s, char by) {
  std::vector<std::string> out(1);
  for (char c : s) {
    if (c == by) {
      out.emplace_back();
    } else {
      out.back() += c;
    }
  }
  return out;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : t(tokens_of(text)) {}

  Module run() {
    while (at < t.size()) top_level();
    return std::move(module);
  }

 private:
  std::vector<Token> t;
  size_t at = 0;
  Module module;
  std::vector<std::map<std::string, std::string>> scopes;  // names that an inner block renames
  int renamed = 0;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error("line " + std::to_string(at < t.size() ? t[at].line : 0) + ": " + what +
                (at < t.size() ? " at '" + t[at].text + "'" : ""));
  }
  const std::string& peek() const {
    static const std::string none;
    return at < t.size() ? t[at].text : none;
  }
  std::string next() {
    if (at >= t.size()) fail("the text ends too early");
    return t[at++].text;
  }
  bool take(const char* word) {
    if (peek() != word) return false;
    ++at;
    return true;
  }
  void expect(const char* word) {
    if (!take(word)) fail(std::string("wanted '") + word + "'");
  }

  void skip_statement() {
    while (next() != ";") {
    }
  }
  void skip_braces() {
    expect("{");
    for (int depth = 1; depth > 0;) {
      const std::string s = next();
      depth += s == "{" ? 1 : s == "}" ? -1 : 0;
    }
  }

  static Space space_of(const std::string& s) {
    if (s == ".global") return Space::kGlobal;
    if (s == ".shared") return Space::kShared;
    if (s == ".local") return Space::kLocal;
    if (s == ".param") return Space::kParam;
    if (s == ".const") return Space::kConst;
    return Space::kNone;
  }

  static uint64_t number(const std::string& s, bool* is_float, int* float_bytes) {
    *is_float = false;
    *float_bytes = 0;
    if (s.size() == 10 && (s.compare(0, 2, "0f") == 0 || s.compare(0, 2, "0F") == 0)) {
      *is_float = true, *float_bytes = 4;
      return std::strtoull(s.c_str() + 2, nullptr, 16);
    }
    if (s.size() == 18 && (s.compare(0, 2, "0d") == 0 || s.compare(0, 2, "0D") == 0)) {
      *is_float = true, *float_bytes = 8;
      return std::strtoull(s.c_str() + 2, nullptr, 16);
    }
    if (s.size() > 1 && s[0] == '0' && (s[1] == 'b' || s[1] == 'B')) return std::strtoull(s.c_str() + 2, nullptr, 2);
    if (s == "WARP_SZ") return 32;
    return std::strtoull(s.c_str(), nullptr, 0);
  }

  // After the space's word: [.align n] .type name [n] [= ...]; leaves the token after it.
  Variable variable(Space space) {
    Variable v;
    v.space = space;
    std::string type;
    int lanes = 1;
    for (;;) {
      const std::string s = peek();
      if (s == ".align") {
        next();
        v.align = std::atoll(next().c_str());
      } else if (s == ".ptr") {  // of parameters: what they point to
        next();
        if (!space_of_pointer()) continue;
      } else if (s == ".v2" || s == ".v4") {
        next();
        lanes = s[2] - '0';
      } else if (s[0] == '.') {
        type = next();
      } else {
        break;
      }
    }
    v.name = next();
    int64_t count = lanes;
    bool array = false;
    while (take("[")) {
      array = true;
      if (take("]")) {
        count = 0;
        continue;
      }
      bool f;
      int b;
      count *= int64_t(number(next(), &f, &b));
      expect("]");
    }
    const int size = bytes_of(type);
    if (v.align < size) v.align = size;
    v.bytes = count * size;
    if (take("=")) initial(v, size, array);
    return v;
  }
  bool space_of_pointer() {
    while (peek() == ".global" || peek() == ".shared" || peek() == ".local" || peek() == ".const") next();
    if (take(".align")) next();
    return true;
  }
  void initial(Variable& v, int size, bool array) {
    const auto one = [&] {
      const bool minus = take("-");
      std::string s = next();
      if (s == "generic") {
        expect("(");
        s = next();
        expect(")");
        v.addresses.push_back({int64_t(v.initial.size()), s});
        s = "0";
      } else if (!std::isdigit((unsigned char)s[0])) {
        v.addresses.push_back({int64_t(v.initial.size()), s});
        s = "0";
      }
      bool f;
      int b;
      uint64_t bits = number(s, &f, &b);
      if (minus) bits = 0 - bits;
      for (int k = 0; k < size; ++k) v.initial.push_back(uint8_t(bits >> 8 * k));
    };
    if (!array) {
      one();
      return;
    }
    expect("{");
    int depth = 1;
    while (depth > 0) {
      if (take("{")) {
        ++depth;
      } else if (take("}")) {
        --depth;
      } else if (!take(",")) {
        one();
      }
    }
    if (v.bytes == 0) v.bytes = int64_t(v.initial.size());
  }

  void top_level() {
    const std::string s = next();
    if (s == ".version" || s == ".address_size") {
      next();
    } else if (s == ".target") {
      module.target = std::atoi(split(next(), '_').back().c_str());
      while (take(",")) next();
    } else if (s == ".file") {
      next(), next();
      while (take(",")) next();
    } else if (s == ".section") {
      next();
      skip_braces();
    } else if (s == ".visible" || s == ".weak" || s == ".common" || s == ".extern") {
      const Space space = space_of(peek());
      if (space != Space::kNone) {
        next();
        Variable v = variable(space);
        v.is_extern = s == ".extern";
        expect(";");
        module.variables.push_back(v);
      }
    } else if (s == ".entry" || s == ".func") {
      function(s == ".entry");
    } else if (s == ".alias" || s == ".pragma") {
      skip_statement();
    } else if (space_of(s) != Space::kNone) {
      module.variables.push_back(variable(space_of(s)));
      expect(";");
    } else {
      --at;
      fail("what is this");
    }
  }

  void function(bool entry) {
    Function f;
    f.entry = entry;
    if (take("(")) {
      while (!take(")")) next();
    }
    f.name = next();
    if (take("(")) {
      int64_t offset = 0;
      while (!take(")")) {
        if (take(",")) continue;
        const std::string space = next();
        if (space == ".reg") {
          next(), next();
          continue;
        }
        Variable v = variable(Space::kParam);
        offset = (offset + v.align - 1) / v.align * v.align;
        v.at = offset;
        offset += v.bytes;
        f.params.push_back(v);
      }
      f.param_bytes = int(offset);
    }
    while (peek() != "{" && peek() != ";") {
      const std::string s = next();
      if (s == ".maxntid" || s == ".reqntid") {
        f.maxntid = std::atoi(next().c_str());
        while (take(",")) f.maxntid *= std::atoi(next().c_str());
      } else if (s == ".minnctapersm") {
        f.minnctapersm = std::atoi(next().c_str());
      }
    }
    if (take(";")) return;
    if (!entry) {
      skip_braces();
      return;
    }
    body(f);
    module.functions.emplace(f.name, std::move(f));
  }

  std::string scoped(const std::string& name) const {
    for (size_t k = scopes.size(); k-- > 0;) {
      const auto found = scopes[k].find(name);
      if (found != scopes[k].end()) return found->second;
    }
    return name;
  }
  std::string declare(const std::string& name) {
    if (scopes.size() <= 1) return name;
    return scopes.back()[name] = name + "@" + std::to_string(++renamed);
  }

  void body(Function& f) {
    expect("{");
    scopes.assign(1, {});
    while (!scopes.empty()) {
      if (take("{")) {
        scopes.emplace_back();
        continue;
      }
      if (take("}")) {
        scopes.pop_back();
        continue;
      }
      if (take(";")) continue;
      const std::string& s = peek();
      if (s == ".reg") {
        next();
        registers(f);
      } else if (s == ".pragma" || s == ".loc") {
        if (s == ".loc") {
          const int line = t[at].line;
          while (at < t.size() && t[at].line == line) ++at;
        } else {
          skip_statement();
        }
      } else if (space_of(s) != Space::kNone) {
        const Space space = space_of(next());
        Variable v = variable(space);
        v.name = declare(v.name);
        expect(";");
        f.variables.push_back(v);
      } else if (at + 1 < t.size() && t[at + 1].text == ":") {
        f.labels[next()] = int(f.body.size());
        next();
        if (peek() == ".branchtargets") fail("branch targets");
      } else {
        statement(f);
      }
    }
  }

  void registers(Function& f) {
    const int size = bytes_of(next());
    do {
      const std::string name = next();
      if (take("<")) {
        const int count = std::atoi(next().c_str());
        expect(">");
        for (int k = 0; k < count; ++k) {
          const std::string one = name + std::to_string(k);
          f.registers[declare(one)] = size;
        }
      } else {
        f.registers[declare(name)] = size;
      }
    } while (take(","));
    expect(";");
  }

  Operand simple() {
    Operand o;
    if (take("!")) o.negated = true;
    const bool minus = take("-");
    const std::string s = next();
    if (std::isdigit((unsigned char)s[0])) {
      o.kind = OperandKind::kImmediate;
      o.bits = number(s, &o.is_float, &o.float_bytes);
      if (minus) o.bits = o.is_float ? o.bits ^ (1ull << (8 * o.float_bytes - 1)) : 0 - o.bits;
    } else if (s == "_") {
      o.kind = OperandKind::kNothing;
    } else {
      o.name = scoped(s);
      o.kind = OperandKind::kRegister;  // or a symbol: distinguished where registers are known
    }
    return o;
  }
  void offset(Operand& o) {
    for (;;) {
      if (take("+")) {
        const bool minus = take("-");
        bool f;
        int b;
        const uint64_t n = number(next(), &f, &b);
        o.bits += minus ? 0 - n : n;
      } else if (take("-")) {
        bool f;
        int b;
        o.bits -= number(next(), &f, &b);
      } else {
        return;
      }
    }
  }
  Operand operand() {
    Operand o;
    if (take("{")) {
      o.kind = OperandKind::kVector;
      while (!take("}")) {
        if (!take(",")) o.elements.push_back(simple());
      }
      return o;
    }
    if (take("[")) {
      const Operand base = simple();
      o.kind = OperandKind::kMemory;
      if (base.kind == OperandKind::kImmediate) {
        o.bits = base.bits;
      } else {
        o.name = base.name;
      }
      offset(o);
      expect("]");
      return o;
    }
    o = simple();
    if (peek() == "+" || (peek() == "-" && o.kind == OperandKind::kRegister)) offset(o);
    if (take("|")) {
      Operand pair;
      pair.kind = OperandKind::kPair;
      pair.elements = {o, simple()};
      return pair;
    }
    return o;
  }

  void statement(Function& f) {
    Statement s;
    s.line = t[at].line;
    if (take("@")) {
      s.guard_negated = take("!");
      s.guard = scoped(next());
    }
    s.opcode = next();
    s.parts = split(s.opcode, '.');
    if (s.parts[0] == "call") {  // a fault where it is reached
      skip_statement();
      f.body.push_back(s);
      return;
    }
    while (!take(";")) {
      if (!take(",")) s.operands.push_back(operand());
    }
    f.body.push_back(s);
  }
};

}  // namespace

Module parse(const std::string& text) { return Parser(text).run(); }

}  // namespace ptx
