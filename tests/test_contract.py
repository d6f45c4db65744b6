"""Every method and every detector of the package obeys its contract."""

import pytest

from foogd.detect import DETECTORS
from foogd.methods import PROFILES, make_method, method_names
from foogd.methods.foogd import FOOGD
from foogd.testing import check_detector, check_method


@pytest.mark.parametrize("name", method_names())
def test_methods_obey_the_contract(name):
    check_method(make_method(name))


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "fixed"])
def test_profiles_of_foogd_obey_the_contract(profile):
    own = {key: value for key, value in PROFILES[profile].items() if key in FOOGD.__dataclass_fields__}
    check_method(make_method("fedavg+foogd", own))


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_obey_the_contract(name):
    check_detector(DETECTORS[name])
