// fastsync._core: the core as Python sees it. Converts and calls; no protocol, no policy.
//
// Every call that can wait releases the interpreter lock; it is taken again for signals and progress (at least every
// kPollInterval), and to drive somebody else's process group.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <memory>

#include "binding/destinations.h"
#include "binding/devices.h"
#include "binding/process_group.h"
#include "binding/tensor_table.h"
#include "binding/torch_access.h"
#include "bucket/share_plan.h"
#include "comm/shm/shm_communicator.h"
#include "common/checksum.h"
#include "common/cpu.h"
#include "control/link.h"
#include "sync/weight_receiver.h"
#include "sync/weight_sender.h"

#ifndef FASTSYNC_VERSION
#define FASTSYNC_VERSION "0"
#endif

namespace py = pybind11;

namespace fastsync::binding {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

std::chrono::nanoseconds to_timeout(double seconds) {
  // Beyond a century is for ever, and would overflow the clock.
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 3.0e9) * 1e9));
}

// `callback` is kept alive by the Python session for the length of the sync; None: signals only.
Wait::Hook make_hook(const py::object& callback) {
  const py::handle borrowed = callback;
  return [borrowed] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!borrowed.is_none()) borrowed();
  };
}

Identity make_identity(int rank, int source, std::vector<int> ranks, std::string token, std::string host) {
  return Identity{rank, source, std::move(ranks), std::move(token), std::move(host), FASTSYNC_VERSION};
}

py::dict phases_dict(const PhaseSeconds& p) {
  py::dict d;
  d["pack"] = p.pack;
  d["transfer"] = p.transfer;
  d["unpack"] = p.unpack;
  d["wait"] = p.wait;
  d["commit"] = p.commit;
  return d;
}

TensorMeta make_meta(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape,
                     std::uint32_t itemsize) {
  TensorMeta meta;
  meta.name = name;
  meta.dtype = dtype;
  meta.shape.assign(shape.begin(), shape.end());
  meta.itemsize = itemsize;
  meta.nbytes = itemsize;
  for (const auto d : meta.shape) meta.nbytes *= static_cast<std::uint64_t>(d);
  return meta;
}

// Does something with the source's tensor `name`; what it throws names the rank and the tensor (`named`: it already does).
template <typename Work>
void on_tensor(const WeightSender& sender, const std::string& name, bool named, Work&& work) {
  try {
    work();
  } catch (const InvalidArgument& why) {
    if (why.rank() >= 0) throw;
    const std::string tensor = named ? std::string() : concat("tensor '", shown_name(name), "': ");
    throw InvalidArgument(concat("rank ", sender.rank(), ": ", tensor, why.message()), sender.rank());
  }
}

// A manifest in shares, one a trainer.
struct Shares {
  SharePlan plan;
  std::vector<Manifest> manifests;

  Shares(const Manifest& whole, std::size_t trainers) : plan(SharePlan::make(whole, trainers)) {
    for (std::size_t k = 0; k < trainers; ++k) manifests.push_back(plan.manifest_of(whole, k));
  }
  // The views of one share out of those of the whole.
  [[nodiscard]] std::vector<TensorView> pick(std::span<const TensorView> views, std::size_t share) const {
    std::vector<TensorView> out;
    out.reserve(plan.shares.at(share).size());
    for (const std::uint32_t i : plan.shares[share]) {
      if (i >= views.size()) throw InternalError("the shares are another table's");
      out.push_back(views[i]);
    }
    return out;
  }
};

PyObject*& error_class(ErrorKind kind) {
  static PyObject* classes[kErrorKindCount] = {};
  return classes[static_cast<std::size_t>(kind)];
}

void translate(std::exception_ptr p) {
  try {
    if (p) std::rethrow_exception(p);
  } catch (const Error& error) {
    PyObject* const type = error_class(error.kind()) != nullptr ? error_class(error.kind()) : PyExc_RuntimeError;
    // what() may have been cut inside a character by a peer.
    const auto text = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(error.message().data(), static_cast<Py_ssize_t>(error.message().size()), "replace"));
    const auto value = py::reinterpret_steal<py::object>(PyObject_CallFunction(type, "Oi", text.ptr(), error.rank()));
    if (value) {
      PyErr_SetObject(type, value.ptr());
    }
  }
}

}  // namespace

// NOLINTNEXTLINE
PYBIND11_MODULE(_core, m) {
  m.doc() = "The fastsync core. Private: use the fastsync package.";
  m.attr("__version__") = FASTSYNC_VERSION;
  m.attr("ALIGNMENT") = kAlignment;
  m.attr("PROTOCOL_VERSION") = kProtocolVersion;
  m.attr("MAX_MESSAGE_BYTES") = kMaxMessageBytes;

  py::register_exception_translator(&translate);
  py::register_exception<SourceClosed>(m, "SourceClosed", PyExc_RuntimeError);
  m.def(
      "set_error_class",
      [](std::uint16_t kind, const py::object& type) {
        if (kind >= kErrorKindCount) throw InvalidArgument(concat("no error kind ", kind));
        Py_INCREF(type.ptr());
        error_class(static_cast<ErrorKind>(kind)) = type.ptr();
      },
      py::arg("kind"), py::arg("type"));

  // --- torch
  m.def(
      "configure_torch",
      [](const py::object& exchange, const py::tuple& plain) { TorchAccess::get().configure(exchange, plain); },
      py::arg("exchange"), py::arg("plain_types"));
  m.def(
      "learn_layout",
      [](const std::vector<std::array<std::uint64_t, 6>>& examples, std::uint64_t plain_keys) {
        std::vector<TorchAccess::Example> out;
        for (const auto& [object, implementation, storage, keys, memory, nbytes] : examples) {
          out.push_back({object, implementation, storage, keys, memory, nbytes});
        }
        return TorchAccess::get().learn_layout(out, plain_keys);
      },
      py::arg("examples"), py::arg("plain_keys"));
  m.def(
      "learn_dtype",
      [](const py::object& example, const std::string& name, std::uint32_t itemsize) {
        TorchAccess::get().learn_dtype(example, name, itemsize);
      },
      py::arg("example"), py::arg("name"), py::arg("itemsize"));

  m.def("dlpack_flags", &dlpack_flags, py::arg("capsule"));
  m.attr("DLPACK_READ_ONLY") = kDlpackReadOnly;
  m.attr("DLPACK_COPIED") = kDlpackCopied;
  m.def(
      "buffer_address",
      [](const py::memoryview& view) {
        return reinterpret_cast<std::uintptr_t>(PyMemoryView_GET_BUFFER(view.ptr())->buf);
      },
      py::arg("view"));
  m.def("shown_name", [](const std::string& name) { return shown_name(name); }, py::arg("name"));

  // --- bytes
  m.def(
      "copy_bytes",
      [](std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, bool streaming) {
        copy_bytes(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), nbytes,
                   streaming ? StoreMode::kStreaming : StoreMode::kCached);
      },
      py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("streaming"), NoGil());
  m.def(
      "copy_many",
      [](const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src,
         const std::vector<std::size_t>& nbytes, bool streaming) {
        if (dst.size() != src.size() || dst.size() != nbytes.size())
          throw InvalidArgument("lists of different lengths");
        const py::gil_scoped_release release;
        const auto start = Clock::now();
        for (std::size_t i = 0; i < dst.size(); ++i) {
          copy_bytes(reinterpret_cast<void*>(dst[i]), reinterpret_cast<const void*>(src[i]), nbytes[i],
                     streaming ? StoreMode::kStreaming : StoreMode::kCached);
        }
        return std::chrono::duration<double>(Clock::now() - start).count();
      },
      py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("streaming"));
  m.def(
      "checksum_bytes",
      [](std::uintptr_t data, std::size_t nbytes) {
        const Checksum c = checksum_bytes(reinterpret_cast<const void*>(data), nbytes, 0);
        return std::pair<std::uint64_t, std::uint64_t>(c.product, c.sum);
      },
      py::arg("data"), py::arg("nbytes"), NoGil());
  m.def("copy_kernel_name", [] { return std::string(copy_kernel_name()); });
  m.def("last_level_cache_bytes", [] { return cache_sizes().last_level; });
  m.def("shm_unavailable_reason", [] { return ShmCommunicator::unavailable_reason(); });

  // --- plan
  py::class_<Manifest>(m, "Manifest")
      .def(py::init<>())
      .def(
          "append",
          [](Manifest& self, std::string name, std::string dtype, std::vector<std::int64_t> shape,
             std::uint32_t itemsize) { self.append(make_meta(name, dtype, shape, itemsize)); },
          py::arg("name"), py::arg("dtype"), py::arg("shape"), py::arg("itemsize"))
      .def("__len__", &Manifest::size)
      .def_property_readonly("nbytes", &Manifest::nbytes)
      .def_property_readonly("fingerprint", &Manifest::fingerprint)
      .def("serialize",
           [](const Manifest& self) {
             const auto bytes = self.serialize(0, self.size());
             return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
           })
      .def(
          "append_serialized",
          [](Manifest& self, std::string_view bytes) {
            self.append_serialized({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
          },
          py::arg("bytes"))
      .def(
          "entry",
          [](const Manifest& self, std::size_t i) {
            if (i >= self.size()) throw py::index_error();
            const TensorMeta& t = self[i];
            return py::make_tuple(t.name, t.dtype, t.shape, t.nbytes, t.itemsize);
          },
          py::arg("index"));
  py::class_<SyncPlan, std::shared_ptr<SyncPlan>>(m, "SyncPlan")
      .def_property_readonly("fingerprint", [](const SyncPlan& p) { return p.manifest.fingerprint(); })
      .def_property_readonly("tensors", [](const SyncPlan& p) { return p.manifest.size(); })
      .def_property_readonly("nbytes", [](const SyncPlan& p) { return p.manifest.nbytes(); })
      .def_property_readonly("buckets", [](const SyncPlan& p) { return p.buckets.buckets.size(); })
      .def_property_readonly("fragments", [](const SyncPlan& p) { return p.buckets.fragments.size(); })
      .def_property_readonly("bucket_bytes", [](const SyncPlan& p) { return p.buckets.bucket_bytes; });
  m.def(
      "plan",
      [](const Manifest& manifest, std::uint64_t bucket_bytes) {
        return std::const_pointer_cast<SyncPlan>(SyncPlan::make(manifest, bucket_bytes));
      },
      py::arg("manifest"), py::arg("bucket_bytes"));

  py::class_<Shares>(m, "Shares")
      .def(py::init([](const SyncPlan& whole, std::size_t trainers) { return Shares(whole.manifest, trainers); }),
           py::arg("whole"), py::arg("trainers"))
      .def_property_readonly("imbalance", [](const Shares& s) { return s.plan.imbalance(); })
      .def_property_readonly("nbytes", [](const Shares& s) { return s.plan.nbytes; })
      .def(
          "fingerprint", [](const Shares& s, std::size_t share) { return s.manifests.at(share).fingerprint(); },
          py::arg("share"))
      .def(
          "plan",
          [](const Shares& s, std::size_t share, std::uint64_t bucket_bytes) {
            return std::const_pointer_cast<SyncPlan>(SyncPlan::make(s.manifests.at(share), bucket_bytes));
          },
          py::arg("share"), py::arg("bucket_bytes"));

  m.attr("NOWHERE") = static_cast<int>(TensorTable::kNowhere);
  py::class_<TensorTable>(m, "TensorTable")
      .def(py::init<int>(), py::arg("rank"))
      .def("refresh", &TensorTable::refresh, py::arg("names"), py::arg("objects"))
      .def("describe", &TensorTable::describe, py::arg("index"), py::arg("dtype"), py::arg("shape"),
           py::arg("byte_strides"), py::arg("itemsize"), py::arg("address"), py::arg("flip_real"), py::arg("flip_imag"),
           py::arg("is_complex"), py::arg("device"))
      .def("device", &TensorTable::device)
      .def("find_ties", &TensorTable::find_ties)
      .def("check_destinations", &TensorTable::check_destinations)
      .def_property_readonly("changed", &TensorTable::changed)
      .def(
          "plan",
          [](const TensorTable& self, std::uint64_t bucket_bytes) {
            return std::const_pointer_cast<SyncPlan>(SyncPlan::make(self.manifest(), bucket_bytes));
          },
          py::arg("bucket_bytes"))
      .def("clear", &TensorTable::clear)
      .def("__len__", &TensorTable::size);

  py::class_<DestinationBinder>(m, "DestinationBinder");
  py::class_<TableBinder, DestinationBinder>(m, "TableBinder")
      .def(py::init<TensorTable&, bool, bool>(), py::arg("table"), py::arg("strict"), py::arg("streaming"),
           py::keep_alive<1, 2>())
      .def_property_readonly("missing", [](const TableBinder& b) { return b.lists().missing; })
      .def_property_readonly("unexpected", [](const TableBinder& b) { return b.lists().unexpected; });

  py::class_<ShareBinder, DestinationBinder>(m, "ShareBinder")
      .def(py::init<TensorTable&>(), py::arg("table"), py::keep_alive<1, 2>());

  bind_devices(m);

  // --- connections
  py::class_<OwnedFd>(m, "Socket");
  m.def(
      "connect_unix",
      [](const std::string& name) -> py::object {
        auto fd = connect_unix(name);
        return fd ? py::cast(std::move(*fd)) : py::none();
      },
      py::arg("name"));
  m.def(
      "connect_tcp",
      [](const std::string& host, int port, double timeout_s) -> py::object {
        std::optional<OwnedFd> fd;
        {
          const py::gil_scoped_release release;
          fd = connect_tcp(host, port, std::chrono::milliseconds(static_cast<int>(std::min(timeout_s, 60.0) * 1000)));
        }
        return fd ? py::cast(std::move(*fd)) : py::none();
      },
      py::arg("host"), py::arg("port"), py::arg("timeout_s"));

  // --- the protocol
  py::class_<Pairing, std::shared_ptr<Pairing>>(m, "Pairing")
      .def(py::init<>())
      .def("next_session", [](Pairing& pairing) { ++pairing.session; });

  py::class_<WeightSender>(m, "WeightSender")
      .def(py::init([](int rank, int source, std::vector<int> ranks, std::string token, std::string host,
                       std::shared_ptr<Pairing> pairing) {
             return std::make_unique<WeightSender>(
                 make_identity(rank, source, std::move(ranks), std::move(token), std::move(host)), std::move(pairing));
           }),
           py::arg("rank"), py::arg("source"), py::arg("ranks"), py::arg("token"), py::arg("host"), py::arg("pairing"))
      .def_property_readonly("unix_name", &WeightSender::unix_name)
      .def("listen_tcp", &WeightSender::listen_tcp)
      .def(
          "open",
          [](WeightSender& s, double timeout_s, const py::object& hook) {
            s.open(to_timeout(timeout_s), make_hook(hook));
          },
          py::arg("timeout_s"), py::arg("hook"))
      .def(
          "use_device",
          [](WeightSender& s, std::shared_ptr<DeviceRuntime> runtime, std::uintptr_t stream) {
            s.use_device(std::move(runtime), reinterpret_cast<void*>(stream));
          },
          py::arg("runtime"), py::arg("stream"))
      .def_property_readonly("transport_reason", &WeightSender::transport_reason)
      .def("connect_all", &WeightSender::connect_all, NoGil())
      .def("join", &WeightSender::join, py::arg("transport"), py::arg("candidates"), NoGil())
      .def(
          "begin",
          [](WeightSender& s, std::uint64_t version, std::uint64_t bucket_bytes, std::uint32_t buffers, bool verify,
             bool strict, const std::shared_ptr<SyncPlan>& plan, bool streaming, std::uint64_t set_id,
             std::uint64_t share_bytes) {
            const py::gil_scoped_release release;
            return s.begin({version, bucket_bytes, buffers, verify, strict, set_id, share_bytes}, plan, streaming);
          },
          py::arg("version"), py::arg("bucket_bytes"), py::arg("buffers"), py::arg("verify"), py::arg("strict"),
          py::arg("plan").none(true), py::arg("streaming"), py::arg("set_id") = 0, py::arg("share_bytes") = 0)
      .def_property_readonly("needs_external", &WeightSender::needs_external)
      .def_property_readonly("comm_generation", &WeightSender::comm_generation)
      .def(
          "attach_external",
          [](WeightSender& s, const py::object& driver) {
            const auto ops = std::make_shared<ProcessGroupOps>(driver);
            s.attach_external(ProcessGroupOps::make(ops));
            ops->keep(s.external_memory());
          },
          py::arg("driver"))
      .def(
          "send_plan",
          [](WeightSender& s, const TensorTable& table) {
            const auto views = table.views();
            const auto stamp = table.layout_stamp();
            const py::gil_scoped_release release;
            s.send_plan(views, stamp);
          },
          py::arg("table"))
      .def(
          "send_share",
          [](WeightSender& s, const TensorTable& table, const Shares& shares, std::size_t share) {
            const auto views = shares.pick(table.views(), share);
            const auto stamp = table.layout_stamp();
            const py::gil_scoped_release release;
            s.send_plan(views, stamp);
          },
          py::arg("table"), py::arg("shares"), py::arg("share"))
      .def(
          "push_plain",
          [](WeightSender& s, const std::string& name, const py::object& object) {
            TensorMeta meta;
            TensorView view;
            int device = -1;
            if (!TorchAccess::get().describe(object, meta, view, device) || device >= 0) return false;
            meta.name = name;
            on_tensor(s, name, true, [&] {
              const py::gil_scoped_release release;
              s.push(std::move(meta), view);
            });
            return true;
          },
          py::arg("name"), py::arg("tensor"))
      .def(
          "push",
          [](WeightSender& s, const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape,
             const py::object& byte_strides, std::uint32_t itemsize, std::uint64_t address, bool flip_real,
             bool flip_imag, bool is_complex, std::uintptr_t stream) {
            TensorView view;
            TensorMeta meta = make_meta(name, dtype, shape, itemsize);
            view.data = reinterpret_cast<std::byte*>(address);
            view.nbytes = meta.nbytes;
            view.itemsize = itemsize;
            view.flip_real = flip_real ? 1 : 0;
            view.flip_imag = flip_imag ? 1 : 0;
            view.complex = is_complex;
            if (!byte_strides.is_none()) {
              view.contiguous = false;
              view.shape = shape;
              view.strides = byte_strides.cast<std::vector<std::int64_t>>();
              on_tensor(s, name, false, [&] { normalize(view); });
            }
            on_tensor(s, name, true, [&] {
              const py::gil_scoped_release release;
              s.push(std::move(meta), view, reinterpret_cast<void*>(stream));
            });
          },
          py::arg("name"), py::arg("dtype"), py::arg("shape"), py::arg("byte_strides"), py::arg("itemsize"),
          py::arg("address"), py::arg("flip_real"), py::arg("flip_imag"), py::arg("is_complex"), py::arg("stream"))
      .def("finish_stream",
           [](WeightSender& s) {
             const py::gil_scoped_release release;
             return std::const_pointer_cast<SyncPlan>(s.finish_stream());
           })
      .def_property_readonly("followed_plan", &WeightSender::followed_plan)
      .def("verified", &WeightSender::verified, NoGil())
      .def("commit",
           [](WeightSender& s) {
             ReadyLists lists;
             {
               const py::gil_scoped_release release;
               lists = s.commit();
             }
             return py::make_tuple(lists.missing, lists.unexpected);
           })
      .def(
          "fail",
          [](WeightSender& s, std::uint16_t kind, int rank, const std::string& message) {
            const py::gil_scoped_release release;
            s.fail(static_cast<ErrorKind>(kind), rank, message);
          },
          py::arg("kind"), py::arg("rank"), py::arg("message"))
      .def("check", &WeightSender::check, NoGil())
      .def("close", &WeightSender::close, py::arg("exiting"), NoGil())
      .def("drop_data_plane", &WeightSender::drop_data_plane, NoGil())
      .def_property_readonly("source", &WeightSender::rank)
      .def_property_readonly("active", &WeightSender::active)
      .def_property_readonly("sync", &WeightSender::sync)
      .def_property_readonly("committed_sync", &WeightSender::committed_sync)
      .def_property_readonly("phases", [](const WeightSender& s) { return phases_dict(s.phases()); })
      .def_property_readonly("bucket_bytes", &WeightSender::bucket_bytes)
      .def_property_readonly("buckets_sent", &WeightSender::buckets_sent)
      .def_property_readonly("bytes_sent", &WeightSender::bytes_sent)
      .def_property_readonly("staging_bytes", &WeightSender::staging_bytes);

  py::class_<WeightReceiver>(m, "WeightReceiver")
      .def(py::init([](int rank, int source, std::vector<int> ranks, std::string token, std::string host,
                       std::shared_ptr<Pairing> pairing) {
             return std::make_unique<WeightReceiver>(
                 make_identity(rank, source, std::move(ranks), std::move(token), std::move(host)), std::move(pairing));
           }),
           py::arg("rank"), py::arg("source"), py::arg("ranks"), py::arg("token"), py::arg("host"), py::arg("pairing"))
      .def(
          "open",
          [](WeightReceiver& r, double timeout_s, const py::object& hook) {
            r.open(to_timeout(timeout_s), make_hook(hook));
          },
          py::arg("timeout_s"), py::arg("hook"))
      .def_property_readonly("connected", &WeightReceiver::connected)
      .def_property_readonly("has_missed", &WeightReceiver::has_missed)
      .def(
          "connect", [](WeightReceiver& r, OwnedFd& socket) { return r.connect(std::move(socket)); }, py::arg("socket"))
      .def(
          "use_device",
          [](WeightReceiver& r, std::shared_ptr<DeviceRuntime> runtime, std::uintptr_t stream, bool flexible) {
            r.use_device(std::move(runtime), reinterpret_cast<void*>(stream), flexible);
          },
          py::arg("runtime"), py::arg("stream"), py::arg("flexible"))
      .def("verify_first", &WeightReceiver::verify_first, py::arg("value"))
      .def_property_readonly("on_device", &WeightReceiver::on_device)
      .def("announce", &WeightReceiver::announce, NoGil())
      .def("ask", &WeightReceiver::ask, py::arg("transport"), NoGil())
      .def(
          "join",
          [](WeightReceiver& r, const std::string& transport) {
            Begin b;
            {
              const py::gil_scoped_release release;
              b = r.join(transport);
            }
            py::dict d;
            d["version"] = b.version;
            d["bucket_bytes"] = b.bucket_bytes;
            d["buffers"] = b.buffers;
            d["verify"] = b.verify != 0;
            d["strict"] = b.strict != 0;
            d["streaming"] = b.streaming != 0;
            d["transport"] = b.transport;
            d["comm_generation"] = b.comm_generation;
            d["fingerprint"] = b.fingerprint;
            d["set_id"] = b.set_id;
            d["share_bytes"] = b.share_bytes;
            return d;
          },
          py::arg("transport"))
      .def(
          "bind", [](WeightReceiver& r, DestinationBinder& binder) { r.bind(binder); }, py::arg("binder"), NoGil())
      .def("ready", &WeightReceiver::ready, NoGil())
      .def_property_readonly("needs_external", &WeightReceiver::needs_external)
      .def(
          "attach_external",
          [](WeightReceiver& r, const py::object& driver) {
            const auto ops = std::make_shared<ProcessGroupOps>(driver);
            r.attach_external(ProcessGroupOps::make(ops));
            ops->keep(r.external_memory());
          },
          py::arg("driver"))
      .def(
          "receive_into",
          [](WeightReceiver& r, TableBinder& binder) { r.receive_into(binder, binder.table().layout_stamp()); },
          py::arg("binder"), NoGil())
      .def(
          "receive_share",
          [](WeightReceiver& r, ShareBinder& binder, std::size_t at_most) {
            return r.receive_into(binder, binder.table().layout_stamp(), at_most);
          },
          py::arg("binder"), py::arg("at_most"), NoGil())
      .def(
          "shares", [](const WeightReceiver& r, std::size_t trainers) { return Shares(r.manifest(), trainers); },
          py::arg("trainers"))
      .def(
          "first_difference",
          [](const WeightReceiver& r, const SyncPlan& mine) { return first_difference(mine.manifest, r.manifest()); },
          py::arg("mine"))
      .def(
          "next_bucket",
          // (address, used_bytes, [(tensor, tensor_offset, bucket_offset, nbytes, completes)], tensors_begin, tensors_end)
          [](WeightReceiver& r, bool exposed) -> py::object {
            std::optional<WeightReceiver::Bucket> bucket;
            {
              const py::gil_scoped_release release;
              bucket = r.next_bucket(exposed);
            }
            if (!bucket) return py::none();
            py::list pieces(bucket->pieces.size());
            for (std::size_t i = 0; i < bucket->pieces.size(); ++i) {
              const auto& p = bucket->pieces[i];
              pieces[i] = py::make_tuple(p.fragment.tensor, p.fragment.tensor_offset, p.fragment.bucket_offset,
                                         p.fragment.nbytes, p.completes);
            }
            return py::make_tuple(reinterpret_cast<std::uintptr_t>(bucket->data), bucket->used_bytes, pieces,
                                  bucket->tensors_begin, bucket->tensors_end);
          },
          py::arg("exposed"))
      .def("bucket_owner",
           [](const WeightReceiver& r) {
             return py::capsule(new std::shared_ptr<void>(r.bucket_owner()),
                                [](void* p) { delete static_cast<std::shared_ptr<void>*>(p); });
           })
      .def("release_bucket", &WeightReceiver::release_bucket, NoGil())
      .def_property_readonly("tensors", [](const WeightReceiver& r) { return r.manifest().size(); })
      .def(
          "entry",
          [](const WeightReceiver& r, std::size_t i) {
            const Manifest& manifest = r.manifest();
            if (i >= manifest.size()) throw py::index_error();
            const TensorMeta& t = manifest[i];
            return py::make_tuple(t.name, t.dtype, t.shape, t.nbytes);
          },
          py::arg("index"))
      .def(
          "verified",
          [](WeightReceiver& r, std::vector<std::string> missing, std::vector<std::string> unexpected) {
            const ReadyLists lists{std::move(missing), std::move(unexpected)};
            const py::gil_scoped_release release;
            r.verified(lists);
          },
          py::arg("missing"), py::arg("unexpected"))
      .def("conclude", &WeightReceiver::conclude, NoGil())
      .def(
          "commit",
          [](WeightReceiver& r, std::vector<std::string> missing, std::vector<std::string> unexpected) {
            const ReadyLists lists{std::move(missing), std::move(unexpected)};
            const py::gil_scoped_release release;
            r.commit(lists);
          },
          py::arg("missing"), py::arg("unexpected"))
      .def(
          "fail",
          [](WeightReceiver& r, std::uint16_t kind, int rank, const std::string& message) {
            const py::gil_scoped_release release;
            r.fail(static_cast<ErrorKind>(kind), rank, message);
          },
          py::arg("kind"), py::arg("rank"), py::arg("message"))
      .def("check", &WeightReceiver::check, NoGil())
      .def("close", &WeightReceiver::close, py::arg("exiting"), NoGil())
      .def_property_readonly("source", &WeightReceiver::source)
      .def_property_readonly("active", &WeightReceiver::active)
      .def_property_readonly("sync", &WeightReceiver::sync)
      .def_property_readonly("committed_sync", &WeightReceiver::committed_sync)
      .def_property_readonly("wrote", &WeightReceiver::wrote)
      .def_property_readonly("held_plan", &WeightReceiver::held_plan)
      .def_property_readonly("deviated", &WeightReceiver::deviated)
      .def_property_readonly("phases", [](const WeightReceiver& r) { return phases_dict(r.phases()); })
      .def_property_readonly("buckets_received", &WeightReceiver::buckets_received)
      .def_property_readonly("bytes_received", &WeightReceiver::bytes_received)
      .def_property_readonly("staging_bytes", &WeightReceiver::staging_bytes);
}

}  // namespace fastsync::binding
