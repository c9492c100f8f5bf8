#include "binding/destinations.h"

#include "common/error.h"

namespace fastsync::binding {

namespace {

std::string quoted_list(const std::vector<std::string>& names) {
  std::string out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i == 8) return out + concat(", ... (", names.size(), " in all)");
    out += concat(i == 0 ? "'" : ", '", shown_name(names[i]), "'");
  }
  return out;
}

}  // namespace

void TableBinder::bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) {
  found_.resize(table_.size(), -1);
  views.reserve(last);
  if (!streaming_) {
    if (const TensorTable::Match* known = table_.remembered_match(manifest.fingerprint())) {
      for (std::size_t i = first; i < last; ++i) {
        const std::int64_t entry = known->entries[i];
        if (entry < 0) {
          views.emplace_back();
        } else {
          views.push_back(table_.view(static_cast<std::size_t>(entry)));
          found_[static_cast<std::size_t>(entry)] = static_cast<std::int64_t>(i);
        }
      }
      lists_.unexpected = known->lists.unexpected;
      return;
    }
  }
  for (std::size_t i = first; i < last; ++i) {
    const TensorMeta& sent = manifest[i];
    const auto it = table_.index().find(sent.name);
    if (it == table_.index().end()) {
      lists_.unexpected.emplace_back(sent.name);
      views.emplace_back();
      if (strict_ && streaming_) {
        throw ManifestMismatch(concat("rank ", table_.rank(), ": the source sends ", describe(sent),
                                      ", which has no destination here (strict=False skips such tensors)"),
                               table_.rank());
      }
      continue;
    }
    const TensorMeta& mine = table_.meta(it->second);
    if (mine.dtype != sent.dtype || mine.shape != sent.shape) {
      throw ManifestMismatch(
          concat("rank ", table_.rank(), ": tensor '", shown_name(sent.name), "': the source sends ", describe(sent),
                 ", the destination is ", describe(mine), "; ", mine.dtype != sent.dtype ? "dtypes" : "shapes",
                 " must be equal (nothing is cast or reshaped)"),
          table_.rank());
    }
    found_[it->second] = static_cast<std::int64_t>(i);
    views.push_back(table_.view(it->second));
    // An empty tensor has no fragment; a view without bytes is "no destination", which is the same thing here.
  }
  if (streaming_ && !table_.overlaps().empty()) {
    const auto [a, b] = table_.overlaps().front();
    throw InvalidArgument(
        concat("rank ", table_.rank(), ": destinations '", shown_name(table_.meta(a).name), "' and '",
               shown_name(table_.meta(b).name),
               "' share memory; with a generator as the source nothing says that they may: pass a mapping "
               "at the source, or separate tensors here"),
        table_.rank());
  }
}

void TableBinder::finish(const Manifest& manifest) {
  found_.resize(table_.size(), -1);
  for (std::size_t k = 0; k < found_.size(); ++k) {
    if (found_[k] < 0) lists_.missing.emplace_back(table_.meta(k).name);
  }
  if (strict_ && (!lists_.missing.empty() || !lists_.unexpected.empty())) {
    std::string text = concat("rank ", table_.rank(), ": ");
    if (!lists_.unexpected.empty()) {
      text += concat(lists_.unexpected.size(),
                     " tensor(s) of the source have no destination here (unexpected: ", quoted_list(lists_.unexpected),
                     ")");
    }
    if (!lists_.missing.empty()) {
      text += concat(lists_.unexpected.empty() ? "" : "; ", lists_.missing.size(),
                     " destination(s) are not sent by the source (missing: ", quoted_list(lists_.missing), ")");
    }
    throw ManifestMismatch(text + "; names are compared exactly, strict=False syncs what both have", table_.rank());
  }
  if (streaming_) return;
  check_sharing(manifest);
  if (table_.remembered_match(manifest.fingerprint()) != nullptr) return;
  TensorTable::Match match;
  match.fingerprint = manifest.fingerprint();
  match.entries.assign(manifest.size(), -1);
  for (std::size_t k = 0; k < found_.size(); ++k) {
    if (found_[k] >= 0) match.entries[static_cast<std::size_t>(found_[k])] = static_cast<std::int64_t>(k);
  }
  match.lists = lists_;
  table_.remember_match(std::move(match));
}

void TableBinder::check_sharing(const Manifest& manifest) const {
  for (const auto& [a, b] : table_.overlaps()) {
    if (found_[a] < 0 || found_[b] < 0) {
      // One of the two is not written, but the other write would change it.
      if (found_[a] < 0 && found_[b] < 0) continue;
    } else {
      const Tie& sa = manifest[static_cast<std::size_t>(found_[a])].tie;
      const Tie& sb = manifest[static_cast<std::size_t>(found_[b])].tie;
      const auto here =
          reinterpret_cast<std::uint64_t>(table_.view(b).data) - reinterpret_cast<std::uint64_t>(table_.view(a).data);
      const auto there = sb.byte_offset - sa.byte_offset;
      if (sa.group != 0 && sa.group == sb.group && here == there && table_.comparable(a) == sa.strides &&
          table_.comparable(b) == sb.strides) {
        continue;
      }
    }
    throw InvalidArgument(
        concat("rank ", table_.rank(), ": destinations '", shown_name(table_.meta(a).name), "' and '",
               shown_name(table_.meta(b).name),
               "' share memory, but the source's tensors of these names do not share it in the same way; "
               "one would overwrite the other: give them separate memory, or tie them on both sides"),
        table_.rank());
  }
}

void ShareBinder::bind(const Manifest& manifest, std::size_t first, std::size_t last, std::vector<TensorView>& views) {
  views.reserve(last);
  for (std::size_t i = first; i < last; ++i) {
    const auto it = table_.index().find(manifest[i].name);
    if (it == table_.index().end()) {
      views.emplace_back();
      continue;
    }
    const TensorView& view = table_.view(it->second);
    if (view.nbytes != manifest[i].nbytes) {
      throw InternalError(concat("share entry ", describe(manifest[i]), " was bound to ", view.nbytes, " bytes"));
    }
    views.push_back(view);
  }
}

}  // namespace fastsync::binding
