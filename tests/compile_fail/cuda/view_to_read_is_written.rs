//! A view to read is nothing that cudarc writes to.
use cudagraph_trees::device::cuda::TypedView;
use cudarc::driver::DevicePtrMut;

fn written<T>(_: &mut impl DevicePtrMut<T>) {}

fn misuse(mut view: TypedView<'_, f32>) {
    written(&mut view);
}

fn main() {}
