// SHA-256, as 64 lower-case hexadecimal digits.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace tilemoe::train {

class Sha256 {
 public:
  Sha256();

  void update(const void* data, size_t bytes);
  // Ends the computation: call it once, and update no more.
  std::string hex();

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

}  // namespace tilemoe::train
