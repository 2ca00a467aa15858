"""The memory that a kernel takes of a multiprocessor, without the machine code."""

from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.compiler import get_ptx_version_from_options
from triton.compiler import make_backend


def allocated_memory(build) -> tuple[int, int]:
    """Returns a build's bytes of shared memory and columns of Blackwell's tensor memory.

    It runs the compiler up to where memory is allocated; LLVM, which takes longer, comes after.
    """
    backend = make_backend(build.target)
    options = backend.parse_options(dict(build.options))
    source, metadata = build.source, {"target": build.target, **options.__dict__}
    stages = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(build.target, options, functions, backend.get_module_map(), context)
    for name, stage in stages.items():
        if name == "llir":
            break
        module = stage(module, metadata)
    # The first passes of CUDABackend.make_llir.
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, build.target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, build.target.arch, version)
    nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
    manager.run(module, "allocate")
    return module.get_int_attr("ttg.shared"), module.get_int_attr("ttg.tensor_memory_size")
