//! One view to write is one argument of a launch.
use cudagraph_trees::device::cuda::TypedViewMut;
use cudarc::driver::{LaunchArgs, PushKernelArg};

fn misuse<'a>(args: &mut LaunchArgs<'a>, view: &'a mut TypedViewMut<'_, f32>) {
    args.arg(&mut *view).arg(&mut *view);
}

fn main() {}
