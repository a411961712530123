#include "sha256.h"

#include <openssl/evp.h>

#include <array>
#include <stdexcept>

namespace tilemoe::train {
namespace {

void require(bool done) {
  if (!done) throw std::runtime_error("SHA-256: libcrypto returned an error");
}

}  // namespace

Sha256::Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  require(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::update(const void* data, size_t bytes) {
  require(EVP_DigestUpdate(context_.get(), data, bytes) == 1);
}

std::string Sha256::hex() {
  std::array<unsigned char, 32> digest{};
  require(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1);
  std::string text;
  for (const unsigned byte : digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace tilemoe::train
